"""``memsave`` and ``memsave report``: its figures are those of a direct measurement at full depth."""

import json
import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hf_memsave
from hf_memsave import MemSaveConfig, commands
from hf_memsave.cli import COMMANDS, main
from hf_memsave.commands import arguments, options
from hf_memsave.config.lora import Lora
from hf_memsave.config.sizes import both, bytes_of, counted
from hf_memsave.measure.training import OPTIMIZERS, Training
from support.fake import directly
from support.helpers import on_stand_in, thinned

WIDTH = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4}
CONFIGS = {
    "bert": {**WIDTH, "num_hidden_layers": 17, "intermediate_size": 128, "attention_probs_dropout_prob": 0.1},
    "llama": {**WIDTH, "num_hidden_layers": 16, "intermediate_size": 88, "num_key_value_heads": 2},
    "opt": {**WIDTH, "num_hidden_layers": 21, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64},
    "t5": {"vocab_size": 96, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "num_layers": 3,
           "num_decoder_layers": 17, "decoder_start_token_id": 0},
    # Every third layer attends to all tokens, the others to a window: two masks, and 17 is no multiple of three.
    "gemma3_text": {**WIDTH, "num_hidden_layers": 17, "intermediate_size": 64, "head_dim": 8, "num_key_value_heads": 2,
                    "layer_types": ((["sliding_attention"] * 2 + ["full_attention"]) * 6)[:17], "sliding_window": 8},
}  # fmt: skip
STACKS = ("encoder", "decoder")


def write_config(folder: Path, model_type: str, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **CONFIGS[model_type], **changes}))
    return folder


def figures_of(folder: Path, *argv: object) -> dict[str, Any]:
    assert main(["report", *map(str, argv), "--json", str(folder / "out.json")]) == 0
    return json.loads((folder / "out.json").read_text())


#: Options of a report beside the model's -> what they make of a training step.
STEPS = {
    ("--dtype", "fp32"): {"dtype": torch.float32},
    ("--autocast", "bf16"): {"dtype": torch.float32, "autocast": torch.bfloat16},
    ("--lora", "r=4,dropout=0.05"): {"lora": Lora(r=4, dropout=0.05)},
    ("--lora", "r=4,dtype=model,dora=true"): {"lora": Lora(r=4, dtype="model", dora=True)},
}


@on_stand_in
@pytest.mark.long
@pytest.mark.parametrize(("model_type", "options"), thinned(3, CONFIGS, STEPS))
def test_report_equals_a_direct_measurement_at_full_depth(model_type, options, tmp_path):
    folder = write_config(tmp_path, model_type)
    figures = figures_of(tmp_path, folder, *options, "--batch-size", 3, "--seq-len", 24)
    config, training = AutoConfig.from_pretrained(folder), Training(batch_size=3, seq_len=24, **STEPS[options])
    for column, memsave in (("stock", None), ("patched", MemSaveConfig())):
        model, kept = directly(config, training, memsave)
        assert figures[column]["kept"] == pytest.approx(sum(kept.values()), rel=0.001)
        assert {n: k for n, k in figures[column]["by_kind"].items() if k} == pytest.approx(kept, rel=0.01, abs=2**14)
        assert figures["numbers"]["parameters"] == model.num_parameters()
        is_few = max(figures[column]["depths"][-1].values()) < max(figures["depth"].values())
        assert is_few or model_type == "gpt2" or "bf16" in options
    sites = Counter((site.status, site.op, site.cls, site.reason) for site in hf_memsave.patch(model, memsave).sites)
    assert {tuple(site): count for *site, count in figures["sites"]} == sites


@on_stand_in
def test_report_prints_sites_table_and_how_it_was_measured(tmp_path, capsys):
    assert main(["report", str(write_config(tmp_path, "t5")), "--seq-len", "16"]) == 0
    output = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in output.splitlines() if line.strip()}
    assert ["patched", "20", "block", "T5Block"] in [line.split() for line in output.splitlines()]
    _, stock, unit, patched, other, freed = lines["all"]
    assert {unit, other} <= {"KiB", "MiB"} and freed.endswith("%")
    assert f"Kept for backward: {patched} {other}, where stock keeps {stock} {unit}: {freed} freed." in output
    size = r"[\d.]+ [KM]iB"
    assert all(re.search(rf"A layer of the {stack} keeps {size} stock, {size} patched", output) for stack in STACKS)
    text = " ".join(output.split())
    assert "T5ForConditionalGeneration, 3 + 17 layers, batch 2 x 16 tokens, bf16" in text
    assert "with 3 + 5 and 5 + 5 and 3 + 7 layers of full width (stock: 3 + 3 and 4 + 3 and 3 + 4); further" in text


@on_stand_in
@pytest.mark.long
def test_report_of_another_depth(tmp_path):
    few, many = (figures_of(tmp_path, write_config(tmp_path, "llama"), "--layers", layers) for layers in (4, 9))
    assert (few["depth"], many["depth"]) == ({"num_hidden_layers": 4}, {"num_hidden_layers": 9})
    added = many["patched"]["kept"] - few["patched"]["kept"]
    assert added == 5 * many["patched"]["per_layer"]["num_hidden_layers"]


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_a_picture_without_what_draws_it_names_the_extra(missing, capsys, monkeypatch):
    monkeypatch.setattr(arguments, "find_spec", lambda name: None if name == missing else options)
    for line in ("demo --out kept.png", "estimate nosuch --html a.html"):  # seen before the model
        assert main(line.split()) == 2
        error = capsys.readouterr().err
        assert missing in error and "pip install 'hf_memsave[plot]'" in error


@pytest.mark.long
@on_stand_in
@pytest.mark.parametrize("line", ["report", "estimate", "plan --budget 24GB", "verify", "auto --memory 24G"])
def test_figures_go_to_standard_output_alone_and_a_model_of_fewer_tokens_has_as_many(line, tmp_path, capsys):
    name, *rest = line.split()
    assert main([name, str(write_config(tmp_path, "gpt2")), *rest, "--json", "-"]) == 0
    output, text = capsys.readouterr()
    found = json.loads(output)
    assert "64 tokens: as many as" in text and found.get("seq_len", 64) == 64
    assert found.get("budget", 24 * 10**9) == 24 * 10**9 and found.get("memory") in (None, 24 * 2**30)


@pytest.mark.parametrize(
    ("rows", "padding", "tokens"),
    [(2048, 0, 512), (512, 0, 512), (514, 1, 512), (66, 1, 64), (64, None, 64), (-1, 5, 512)],
)
def test_the_length_is_what_the_model_has_positions_for(rows, padding, tokens):
    """RoBERTa numbers positions from behind its padding's; XLNet has none."""
    config = AutoConfig.for_model("bert", pad_token_id=padding, max_position_embeddings=rows)
    note = options.settle_sizes(args := Namespace(model="x", batch_size=None, seq_len=None), config)
    assert (args.batch_size, args.seq_len) == (2, tokens)
    assert note == ("64 tokens: as many as x takes.\n" if tokens == 64 else "")


def test_sizes_are_read_as_people_write_them_and_told_in_both_units():
    for text in ("24G", "24g", "24GiB", "24 GiB", "24gib", "25769803776"):
        assert bytes_of(text) == 24 * 2**30, text
    assert bytes_of("24GB") == bytes_of("24gb") == 24 * 10**9 and bytes_of("800M") == 800 * 2**20
    assert both(24 * 10**9) == "22.35 GiB (24.0 GB)" and both(3 * 2**20) == "3.00 MiB (3.1 MB)"
    assert [counted(n, "model") for n in (0, 1, 2, "6 + 6")] == ["0 models", "1 model", "2 models", "6 + 6 models"]


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"demo", "plan"}))
def test_checkpoint_and_offload_are_options_of_every_command_and_optimizers_are_those_there_are(name):
    arguments.add_options(parser := ArgumentParser(), name)
    for rung in ("o_proj", "qkv", "up", "gate", "block"):
        args = parser.parse_args(["bert", "--memsave", "tempo", "--checkpoint", rung, "--offload"])
        expected = replace(hf_memsave.MemSaveConfig.preset("tempo"), checkpoint=rung, offload=True)
        assert arguments.memsave_of(args) == expected
        assert arguments.memsave_in_words(args) == f"tempo, checkpoint {rung}, offload"
    assert arguments.memsave_of(parser.parse_args(["bert"])) == hf_memsave.MemSaveConfig()
    assert arguments.OPTIONS["--optimizer"]["choices"] == list(OPTIMIZERS)


@pytest.mark.long
def test_nothing_but_the_answer_is_written_where_output_is_piped(tmp_path):
    """No progress, nor what libraries log as they are loaded; of saved weights too."""
    config = AutoConfig.from_pretrained(write_config(tmp_path, "gpt2"))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "saved")
    command = [sys.executable, "-m", "hf_memsave.cli", "verify", str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "" and done.stdout.startswith("GPT2LMHeadModel, weights of saved: input_ids [2, 64]")
    assert "\n\n\n" not in done.stdout


def test_the_commands_own_help_loads_no_library_and_takes_less_than_half_a_second():
    code = """
import sys, time
from hf_memsave.cli import main
for argv in (["--help"], ["-h"], [], ["--version"]):
    try:
        main(argv)
    except SystemExit as end:
        assert not end.code
print("loaded", {"torch", "transformers", "numpy", "rich", "yaml"} & set(sys.modules), time.process_time())
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    *_, version, loaded = output.splitlines()
    assert version == f"hf_memsave {hf_memsave.__version__}" and output.count("usage: memsave") == 3
    assert loaded.startswith("loaded set() ") and float(loaded.split()[-1]) < 0.5
    files = Path(commands.__file__).parent.glob("*.py")
    assert {path.stem for path in files if "def run(" in path.read_text()} == COMMANDS.keys()
    assert all(f"    {name}  " in output and " ".join(line.split()[:3]) in output for name, line in COMMANDS.items())
