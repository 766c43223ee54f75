"""``memsave``: sizes, options, what is written; ``plan`` writes a configuration, and what ``doctor`` prints is so."""

import contextlib
import json
import logging
import os
import pty
import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from dataclasses import replace
from importlib.metadata import distributions, requires, version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertForSequenceClassification

import hf_memsave
from hf_memsave import MemSaveConfig, PlanError, commands, estimate, patch
from hf_memsave.cli import COMMANDS, main
from hf_memsave.commands import arguments, doctor, options
from hf_memsave.config.sizes import both, bytes_of, counted
from hf_memsave.measure.lora import Lora
from hf_memsave.measure.training import OPTIMIZERS
from support.helpers import on_stand_in


@pytest.fixture
def gpt2(tmp_path):
    """A folder with the configuration of a small model, that takes 64 tokens."""
    config = {"model_type": "gpt2", "vocab_size": 96, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


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
def test_figures_go_to_standard_output_alone_and_a_model_of_fewer_tokens_has_as_many(line, gpt2, capsys):
    name, *rest = line.split()
    assert main([name, str(gpt2), *rest, "--json", "-"]) == 0
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


def test_more_tokens_than_a_model_was_made_for_are_told_where_positions_are_rotary():
    config = AutoConfig.for_model("llama", num_hidden_layers=1, max_position_embeddings=1024)
    note = options.settle_sizes(Namespace(model="x", batch_size=None, seq_len=100_000), config)
    assert note == "100,000 tokens: more than the 1,024 positions that x was made for.\n"
    assert options.settle_sizes(Namespace(model="x", batch_size=None, seq_len=1024), config) == ""


def test_sizes_are_read_as_people_write_them_and_told_in_both_units():
    assert {bytes_of(text) for text in ("24G", "24g", "24GiB", "24 GiB", "24gib", "25769803776")} == {24 * 2**30}
    assert [bytes_of(size) for size in (7, "1.5MiB", "800MB")] == [7, 3 * 2**19, 8 * 10**8]
    assert [bytes_of(size) for size in ("64TiB", "2 tb", "9" * 400 + "GB")] == [2**46, 2 * 10**12, sys.maxsize]
    for size in ("16", "much", "GiB", 1.5, -5, 0, "0GiB", "-1GiB", True, None, "infGiB"):
        with pytest.raises(PlanError, match=r"expected bytes, or a text .*more than 0, got .*a unit: .*GiB, TiB, KB"):
            bytes_of(size)
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
def test_nothing_but_the_answer_is_written_where_output_is_piped(gpt2):
    """No progress, nor what libraries log as they are loaded; of saved weights too."""
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(gpt2)).save_pretrained(gpt2 / "saved")
    command = [sys.executable, "-m", "hf_memsave.cli", "verify", str(gpt2 / "saved")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    taken, title, *_ = done.stdout.splitlines()
    assert done.stderr == "" and title.startswith("GPT2LMHeadModel, weights of saved: input_ids [2, 64]")
    assert taken.startswith("0.0 M parameters: weights, gradients and their comparison take about ")
    assert "\n\n\n" not in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("options", ["", "--json -"])
def test_a_terminal_shows_from_the_start_what_is_done_and_for_how_long_but_not_beside_json(options, gpt2):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "hf_memsave.cli", "verify", ".", *options.split()]
    terminal = {"stdout": theirs, "stderr": theirs, "env": {**os.environ, "TERM": "xterm"}}
    process, shown = subprocess.Popen(command, cwd=gpt2, **terminal), b""
    os.close(theirs)
    with contextlib.suppress(OSError):  # which ends what a terminal gives
        while text := os.read(ours, 4096):
            shown += text
    os.close(ours)
    assert process.wait() == 0 and b"GPT2LMHeadModel" in shown
    words = b"Transformers", rb"Loading \.", b"Running"
    steps = [re.search(rb"%b \.\.\. .*\d:\d\d:\d\d" % word, shown) for word in words]
    assert [one is None for one in steps] == [bool(options)] * 3
    assert options or steps[0].start() < steps[1].start() < shown.index(b"GPT2LMHeadModel")


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


@pytest.mark.long
@on_stand_in
def test_what_fits_is_said_and_written_and_patches_a_model(tmp_path, capsys):
    out = tmp_path / "plan.yaml"
    command = f"plan bert --layers 6 --batch-size 4 --seq-len 256 --optimizer sgd --out {out}".split()
    assert main([*command, "--budget", "30GiB"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("bert: batch 4 x 256 tokens, bf16, sgd, all parameters\n")
    assert "Stock fits in 30.00 GiB (32.2 GB): you need nothing.\nTrain without memsave" in said and not out.exists()
    step = {"batch_size": 4, "seq_len": 256, "optimizer": "sgd"}
    floor = estimate(BertConfig(num_hidden_layers=6), **step).patched.needed
    assert main([*command, "--budget", str(floor)]) == 0
    said = capsys.readouterr().out
    assert f"The cheapest in {both(floor)}: no product runs again" in said
    assert said.endswith(f'Use it: Trainer(..., memsave="{out}"), or hf_memsave.patch(model, "{out}").\n')
    assert MemSaveConfig.from_file(out) == MemSaveConfig()
    floor = estimate(BertConfig(num_hidden_layers=6), **step | {"batch_size": 32}).patched.needed
    assert main([*command, "--budget", f"{floor // 2**20 - 100}MiB", "--batch-size", "32"]) == 0
    config = MemSaveConfig.from_file(out)
    assert config.checkpoint or config.offload
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=6, hidden_size=64, num_attention_heads=4))
    assert patch(model, out).config == config == patch(model, str(out)).config


@on_stand_in
@pytest.mark.parametrize(
    ("kind", "fields"), [("t5", ["num_layers", "num_decoder_layers"]), ("gemma3_text", ["num_hidden_layers"])]
)
def test_layers_are_those_of_every_stack_and_a_list_by_layer_has_as_many_entries(kind, fields, monkeypatch):
    asked = []
    monkeypatch.setattr("hf_memsave.commands.plan.plan", lambda config, **options: asked.append(config) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["plan", kind, "--budget", "30GiB", "--layers", "3"])
    assert [getattr(asked[0], field) for field in fields] == [3] * len(fields)
    assert len(getattr(asked[0], "layer_types", None) or range(3)) == 3


#: Options of a step, and what is estimated or planned for.
STEP = (
    "--batch-size 3 --seq-len 8 --autocast fp16 --optimizer sgd --lora r=2,dora=true --quantized nf4 --checkpointing "
    "--accumulation 5 --attention efficient --padded --holds-output --devices 4 --sharding fsdp"
)
ASKED = dict(
    batch_size=3, seq_len=8, dtype=torch.float32, autocast=torch.float16, optimizer="sgd", lora=Lora(r=2, dora=True),
    quantized="nf4", checkpointing=True, accumulation=5, attention="efficient", padded=True, holds_output=True,
    devices=4, sharding="fsdp",
)  # fmt: skip
#: Command -> further options, and what they ask for.
FURTHER = {
    "estimate": ("--memory 1GiB --layers 2 --checkpoint gate --offload", dict(
        memory=2**30, layers=2, memsave=MemSaveConfig(checkpoint="gate", offload=True))),
    "plan": ("--budget 2GiB --main-memory 1GiB --memsave tempo", dict(
        budget=2**31, main_memory=2**30, memsave=MemSaveConfig.preset("tempo"))),
}  # fmt: skip


@pytest.mark.parametrize("command", FURTHER)
def test_every_option_of_a_step_is_asked_for(command, gpt2, monkeypatch):
    asked, (further, expected) = [], FURTHER[command]
    name = f"hf_memsave.commands.{command}.{command}"
    monkeypatch.setattr(name, lambda config, **options: asked.append(options) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main([command, str(gpt2), *STEP.split(), *further.split()])
    assert asked == [ASKED | expected]


def call_doctor(capsys, *argv: object) -> tuple[int, list[list[str]], str]:
    """Status, the words of each line of output, and errors."""
    status = main(["doctor", *map(str, argv)])
    assert logging.root.manager.disable == 0 and not logging.getLogger("torch._subclasses.fake_tensor").disabled
    output, error = capsys.readouterr()
    return status, [line.split() for line in output.splitlines()], error


def test_doctor_prints_versions_and_devices_and_which_packages_are_too_old_or_missing(capsys, monkeypatch):
    status, lines, error = call_doctor(capsys)
    assert (status, error) == (0, "")
    assert ["hf_memsave", hf_memsave.__version__] in lines
    kernels = Path(hf_memsave.__file__).parent / "_vendor" / "memsave_kernels" / "VERSION"
    assert ["memsave_kernels", kernels.read_text().strip()] in lines
    bounds = dict(one.split(">=") for one in requires("hf_memsave") if ">=" in one and ";" not in one)
    for name, installed in {"torch": torch.__version__, "transformers": version("transformers")}.items():
        assert [name, installed, "(needs", f">={bounds[name]})"] in lines
    assert any(line[:1] == ["cpu"] and "bf16" in line for line in lines)
    assert any(line[:1] == (["cuda:0"] if torch.cuda.is_available() else ["cuda"]) for line in lines)
    assert lines[-1] == "Nothing found that prevents patching.".split()
    found = {"peft": [SimpleNamespace(version="0.17.1")], "torch": [*distributions(name="torch")]}
    monkeypatch.setattr(doctor, "distributions", lambda name: found.get(name, []))
    status, lines, error = call_doctor(capsys)
    assert status == 1 and "peft: expected >=0.18, got 0.17.1. Run: pip install 'peft>=0.18'" in error
    assert ["trl", "not", "installed"] in lines


@pytest.mark.parametrize(("model_type", "norm"), [("bert", "recompute"), ("vit", "recompute"), ("bert", "stock")])
def test_doctor_lists_the_sites_that_patch_finds_and_those_a_preset_leaves(model_type, norm, tmp_path, capsys):
    config = {"model_type": model_type, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    config["num_hidden_layers"] = 3 if model_type == "bert" else 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "memsave.yaml").write_text(f"norm: {norm}")
    status, lines, error = call_doctor(capsys, tmp_path, "--memsave", tmp_path / "memsave.yaml")
    assert (status, error) == (0, "")
    model = doctor.build_empty(AutoConfig.from_pretrained(tmp_path))
    assert all(parameter.is_meta for parameter in model.parameters()) and model.training
    sites = patch(model, MemSaveConfig(norm=norm)).sites
    for (op, cls), count in Counter((site.op, site.cls) for site in sites).items():
        assert [str(count), op, cls] in [line[-3:] for line in lines]
    text, blocks = " ".join(sum(lines, [])), sum(site.op == "block" for site in sites)
    others = "7 other modules" if norm == "stock" else "0 other modules"
    assert blocks == config["num_hidden_layers"]
    assert f"1 model and {blocks} repeated blocks covered, {others} patched, 0 skipped." in text
    assert norm == "recompute" or ["7", "quiet", "LayerNorm"] in [line[-3:] for line in lines]


def test_a_step_is_described_as_it_was_asked_for():
    given = Namespace(model="bert", batch_size=4, seq_len=256, dtype=None, optimizer="sgd", autocast="bf16")
    given.lora, given.quantized = Lora(r=8), "nf4"
    said = options.setting_in_words(given)
    assert said.startswith("bert: batch 4 x 256 tokens, bf16 autocast, fp32 weights, sgd, LoRA (r 8, ")
    assert said.endswith("), nf4")
