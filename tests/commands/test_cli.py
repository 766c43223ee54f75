"""``memsave`` and ``memsave report``: its figures are those of a direct measurement at full depth."""

import json
import re
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

import hf_memsave
import hf_memsave_cli
from hf_memsave import commands
from hf_memsave.cli import main
from hf_memsave.measure.skip_values import SkipValues
from hf_memsave.measure.training import Training, build

WIDTH = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4}
CONFIGS = {
    "bert": {**WIDTH, "num_hidden_layers": 17, "intermediate_size": 128, "attention_probs_dropout_prob": 0.1},
    "llama": {**WIDTH, "num_hidden_layers": 16, "intermediate_size": 88, "num_key_value_heads": 2},
    "opt": {**WIDTH, "num_hidden_layers": 21, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64},
    "t5": {
        "vocab_size": 96, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "num_layers": 3,
        "num_decoder_layers": 17, "decoder_start_token_id": 0,
    },
    # Every third layer attends to all tokens, the others to a window: two masks, and 17 is no multiple of three.
    "gemma3_text": {
        **WIDTH, "num_hidden_layers": 17, "intermediate_size": 64, "head_dim": 8, "num_key_value_heads": 2,
        "sliding_window": 8,
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 5 + ["sliding_attention"] * 2,
    },
}  # fmt: skip
HEADS = {"bert": AutoModelForSequenceClassification, "t5": AutoModelForSeq2SeqLM}


def write_config(folder: Path, model_type: str, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **CONFIGS[model_type], **changes}))
    return folder


def report(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    status = main(["report", *map(str, argv)])
    return status, *capsys.readouterr()


@pytest.mark.long
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_report_equals_a_direct_measurement_at_full_depth(model_type, autocast, tmp_path, capsys):
    folder = write_config(tmp_path, model_type)
    options = ["--autocast", "bf16"] if autocast else ["--dtype", "fp32"]
    status, _, errors = report(
        capsys, folder, *options, "--batch-size", 3, "--seq-len", 24, "--json", tmp_path / "out.json"
    )
    assert status == 0, errors
    figures = json.loads((tmp_path / "out.json").read_text())

    config = AutoConfig.from_pretrained(folder, attention_probs_dropout_prob=0.0, attn_pdrop=0.0)
    model = HEADS.get(model_type, AutoModelForCausalLM).from_config(config).train()
    for module in model.modules():
        if type(module).__name__ == "T5Attention":
            module.dropout = 0.0
            if module.has_relative_attention_bias:
                module.relative_attention_bias.requires_grad_(False)
    ids = torch.randint(2, 96, (3, 24))
    batch = {"input_ids": ids, "labels": ids[:, 0] % 2 if model_type == "bert" else ids.clone()}

    def forward(**inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return model(**inputs)

    assert figures["parameters"] == model.num_parameters()
    assert max(figures["measured"]["stock"][-1].values()) < max(figures["depth"].values())
    assert max(figures["measured"]["patched"][-1].values()) < max(figures["depth"].values()) or model_type == "gpt2"
    assert figures["stock"]["by_kind"] == hf_memsave.measure_kept(model, batch, forward).by_kind
    sites = hf_memsave.patch(model)
    counts = Counter((site.status, site.op, site.cls, site.reason) for site in sites.sites)
    found = {tuple(s[key] for key in ("status", "op", "class", "reason")): s["count"] for s in figures["sites"]}
    assert found == counts
    patched = {kind: kept for kind, kept in figures["patched"]["by_kind"].items() if kept}
    assert patched == hf_memsave.measure_kept(model, batch, forward).by_kind


def test_report_lays_wide_weights_over_one_another_and_counts_the_same(tmp_path, capsys):
    wide = {"vocab_size": 512, "hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = write_config(tmp_path, "llama", num_hidden_layers=11, intermediate_size=768, **wide)
    out = tmp_path / "out.json"
    assert report(capsys, folder, "--batch-size", 2, "--seq-len", 16, "--autocast", "bf16", "--json", out)[0] == 0
    figures = json.loads(out.read_text())
    assert figures["measured"]["patched"][-1] == figures["depth"]
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).train()
    ids = torch.randint(2, 512, (2, 16))
    assert figures["parameters"] == model.num_parameters()
    for setting in ("stock", "patched"):
        with torch.autocast("cpu", torch.bfloat16):
            found = hf_memsave.measure_kept(model, {"input_ids": ids, "labels": ids.clone()}).by_kind
        assert {kind: kept for kind, kept in figures[setting]["by_kind"].items() if kept} == found
        hf_memsave.patch(model)
    with SkipValues(shares=True):
        built = build(AutoConfig.from_pretrained(folder), Training(batch_size=1, seq_len=1, dtype=torch.float32))
    assert sum({p.untyped_storage().data_ptr(): p.nbytes for p in built.parameters()}.values()) < model.num_parameters()


def test_report_prints_sites_table_and_how_it_was_measured(tmp_path, capsys):
    status, output, _ = report(capsys, write_config(tmp_path, "t5"), "--seq-len", 16)
    assert status == 0
    lines = {line.split()[0]: line.split() for line in output.splitlines() if line.strip()}
    assert ["20", "T5Block", "block", "patched"] in lines.values()
    assert len(lines["all"]) == 7  # MiB and, for each stack, u per layer: stock and patched
    text = " ".join(output.split())
    assert "T5ForConditionalGeneration, 3 + 17 layers, batch 4 x 16 tokens, bf16" in text
    assert "3 + 5 and 9 + 5 and 3 + 11 layers of full width (stock: 1 + 1 and 2 + 1 and 1 + 2)" in text
    assert "Extrapolated" in text
    assert "attention has no dropout and the position bias is frozen" in text


def test_report_of_another_depth(tmp_path, capsys):
    folder = write_config(tmp_path, "llama")
    totals = []
    for layers in (4, 9):
        assert report(capsys, folder, "--layers", layers, "--json", tmp_path / "out.json")[0] == 0
        figures = json.loads((tmp_path / "out.json").read_text())
        assert figures["depth"] == {"num_hidden_layers": layers}
        totals.append(figures["patched"]["total"])
    assert totals[1] - totals[0] == 5 * figures["patched"]["per_layer"]["num_hidden_layers"]["total"]


def test_report_builds_the_architecture_the_config_names(tmp_path, capsys):
    folder = write_config(tmp_path, "bert", architectures=["BertForMaskedLM"])
    assert "BertForMaskedLM" in report(capsys, folder / "config.json", "--seq-len", 8)[1]


def test_report_draws_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "kept.png"
    assert report(capsys, write_config(tmp_path, "llama"), "--plot", picture)[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


def test_report_leaves_the_machine_its_memory(tmp_path, capsys):
    status, _, error = report(capsys, write_config(tmp_path, "llama"), "--batch-size", 10**9)
    assert status == 2 and "Lower --batch-size" in error


def test_report_refuses_layers_that_are_not_alike(tmp_path, capsys):
    config = {**WIDTH, "num_hidden_layers": 18, "num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "mlp_only_layers": [14]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **config, **experts}))
    status, _, error = report(capsys, tmp_path)
    assert status == 2 and "are not alike" in error


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["missing.json"], "no such file or folder"),
        (["./missing/folder"], "no such file or folder"),
        (["."], "expected a config.json in this folder"),
        (["broken.json"], "not a valid JSON file"),
        (["other.json"], "Should have a `model_type` key"),
        (["funnel"], "cannot change the depth"),
        (["vit"], "no language modelling or classification head"),
        (["bert", "--memsave", "nope"], "unknown preset 'nope'"),
        (["bert", "--autocast", "bf16", "--dtype", "bf16"], "Leave one out"),
        (["bert", "--plot", "nowhere/kept.png"], "expected a file in a folder that exists"),
        (["bert", "--plot", "kept.xyz"], "expected a name that ends in .png"),
        (["bert", "--json", "."], "expected a file in a folder that exists"),
        (["tiny/config.json", "--seq-len", "100"], "Lower --seq-len"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_report_errors_are_one_line_with_a_remedy(argv, expected, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text("{")
    Path("other.json").write_text('{"hidden_size": 3}')
    Path("tiny").mkdir()
    write_config(Path("tiny"), "gpt2")
    status, output, error = report(capsys, *argv)
    assert (status, output.strip()) == (2, "")
    assert error.startswith("memsave report: error: ") and error.count("\n") == 1
    assert expected in error


def test_report_without_matplotlib_names_the_extra(capsys, monkeypatch):
    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    status, _, error = report(capsys, "bert", "--plot", "kept.png")
    assert status == 2 and "pip install 'hf_memsave[plot]'" in error


@pytest.mark.parametrize(
    "argv", [["nope"], ["report"], ["report", "bert", "--batch-size", "0"], ["demo", "--steps", "x"]], ids=str
)
def test_unusable_arguments_end_with_status_2(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    assert "error:" in capsys.readouterr().err


def in_a_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("argv", [["--help"], ["-h"], [], ["--version"]], ids=str)
def test_the_commands_own_help_loads_no_library_and_takes_less_than_a_second(argv):
    code = f"""
import sys, time
start = time.perf_counter()
from hf_memsave_cli import main
try:
    main({argv})
except SystemExit as end:
    assert not end.code
heavy = {{"torch", "transformers", "numpy", "rich", "hf_memsave"}} & set(sys.modules)
print("loaded", heavy, "fast", time.perf_counter() - start < 1)
"""
    output = in_a_process(code)
    assert output.endswith("loaded set() fast True\n")
    assert "hf_memsave 0." in output if argv == ["--version"] else output.count("usage: memsave") == 1


def test_the_help_names_every_command_in_its_own_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    _, found = hf_memsave_cli.top_level()
    for path in Path(commands.__file__).parent.glob("*.py"):
        if "def add_to(" in path.read_text():
            import_module(f"hf_memsave.commands.{path.stem}").add_to(found)
    assert {action.dest: action.help for action in found._choices_actions} == hf_memsave_cli.COMMANDS


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["doctor", "--memsave", "nope"], "unknown preset 'nope'.* Leave --memsave out for the exact default"),
        (["doctor", "--memsave", "empty.yaml"], "empty.yaml is empty.* Leave --memsave out for the exact default"),
        (["report", "bert", "--memsave", "nope"], "Leave --memsave out"),
        (["verify", "bert", "--memsave", "nope"], "Leave --memsave out"),
        (["report", "bert", "--seq-len", "100000"], "--seq-len"),
    ],
    ids=str,
)
def test_errors_advise_in_options(argv, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.yaml").write_text("# nothing yet")
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert re.search(expected, error) and error.count("\n") == 1
    assert not re.search(r"memsave=|MemSaveConfig\(|(?<!-)\b(seq_len|batch_size)\b", error)


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"hf_memsave {hf_memsave.__version__}\n"


# Adapters


@pytest.mark.long
@pytest.mark.parametrize("spec", ["r=4,dropout=0.05", "r=4,dtype=model,targets=q_proj+down_proj", "dora=true"])
def test_report_of_adapters_equals_a_direct_measurement(spec, tmp_path, capsys):
    folder = write_config(tmp_path, "llama")
    out = tmp_path / "out.json"
    status, text, errors = report(capsys, folder, "--lora", spec, "--batch-size", 3, "--seq-len", 24, "--json", out)
    assert status == 0, errors
    figures = json.loads(out.read_text())
    lora = figures["lora"]
    assert f"r {lora['r']}" in text and "lora_magnitude_vector" not in text
    targets = lora["targets"].split("+") if "+" in lora["targets"] else lora["targets"]
    config = LoraConfig(r=lora["r"], lora_dropout=lora["dropout"], target_modules=targets, use_dora=lora["dora"])
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model = get_peft_model(base, config, autocast_adapter_dtype=lora["dtype"] == "fp32").train()
    ids = torch.randint(2, 96, (3, 24))
    assert figures["parameters"] == model.num_parameters()
    assert figures["stock"]["total"] == hf_memsave.measure_kept(model, {"input_ids": ids, "labels": ids}).total
    hf_memsave.patch(model)
    assert figures["patched"]["total"] == hf_memsave.measure_kept(model, {"input_ids": ids, "labels": ids}).total


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rank=4", "expected r=...,alpha=...,dropout=...,targets=...,dtype=...,dora=..., each once, got 'rank=4'"),
        ("r=4,r=8", "each once, got 'r=8'"),
        ("dora=yes", "expected dora=true or dora=false, got 'yes'"),
        ("targets=+", "expected names joined by +, got targets='+'"),
        ("r=four", "expected a number for r, got 'four'"),
        (
            "dropout=1",
            "expected r from 1, alpha above 0, dropout in [0, 1), dtype fp32 or model, got r 8, alpha 16, dropout 1.0",
        ),
    ],
)
def test_report_refuses_adapters_it_does_not_know(spec, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        report(capsys, write_config(tmp_path, "llama"), "--lora", spec)
    assert message in capsys.readouterr().err


def test_report_refuses_targets_that_the_model_lacks(tmp_path, capsys):
    status, _, error = report(capsys, write_config(tmp_path, "llama"), "--lora", "targets=query")
    assert status == 2 and "'query'" in error and "Name modules of LlamaForCausalLM with targets=a+b" in error
