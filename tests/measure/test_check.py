"""``memsave estimate --check``: a real step on this machine takes what was predicted, and another figure is seen."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from hf_memsave import MemSaveConfig
from hf_memsave.cli import main
from hf_memsave.errors import MeasureError
from hf_memsave.measure import check as module
from hf_memsave.measure.check import SLACK, Check, check
from hf_memsave.measure.estimate import WORKSPACES, estimate
from hf_memsave.measure.training import Training
from support.helpers import on_stand_in

WIDE = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 99, "pad_token_id": 0}
STEP = {"batch_size": 4, "seq_len": 64}


def command(tmp_path, family, *options):
    config = {"model_type": family, **WIDE, "num_hidden_layers": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = ["estimate", tmp_path / "config.json", "--batch-size", 4, "--seq-len", 64, "--check", *options]
    return main([*map(str, argv), "--json", str(tmp_path / "out.json")])


@pytest.mark.long
@on_stand_in
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("bert", ["--autocast", "bf16", "--padded"]),
        pytest.param("llama", ["--quantized", "nf4", "--lora", "r=4", "--checkpointing"], marks=pytest.mark.matrix),
        pytest.param("bert", ["--checkpointing", "--optimizer", "sgd_momentum"], marks=pytest.mark.matrix),
        ("llama", ["--accumulation", "2", "--attention", "eager", "--lora", "r=4,dropout=0.1"]),
    ],
    ids=str,
)
def test_a_step_takes_what_was_predicted(family, options, tmp_path, capsys):
    assert command(tmp_path, family, *options) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "Check on the CPU, as there is no CUDA device here" in output
    assert "Within what is allowed (kept 1%, peak 3%)." in output
    found = json.loads((tmp_path / "out.json").read_text())["check"]
    assert found["device"] == "cpu"
    for what in ("kept", "peak"):
        stock, patched = (found[name]["measured"][what] for name in ("stock", "patched"))
        assert stock > patched > 0 or what == "peak" or "--checkpointing" in options
        assert f"{stock / 2**20:,.2f} MiB" in output
    assert found["stock"]["predicted"]["kept"] == pytest.approx(found["stock"]["measured"]["kept"], rel=0.001)


@pytest.mark.long
@on_stand_in
def test_another_figure_is_seen_and_what_cannot_be_checked_is_told(tmp_path, capsys, monkeypatch):
    assert command(tmp_path, "llama", "--devices", "2") == 2
    assert "--check runs the step on one device" in capsys.readouterr().err
    stock = module.trace_at

    def longer(config, depth, training, memsave, **options):
        return stock(config, depth, replace(training, seq_len=66), memsave, **options)

    monkeypatch.setattr(module, "trace_at", longer)
    assert command(tmp_path, "bert") == 1
    assert "Not within what is allowed" in capsys.readouterr().out
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 2**20}))
    assert command(tmp_path, "llama") == 2
    assert "To check it there, lower --batch-size, --seq-len" in capsys.readouterr().err


@pytest.mark.long
@on_stand_in
def test_on_cuda_the_allocators_peak_is_asked_for(monkeypatch):
    config = LlamaConfig(**WIDE, num_hidden_layers=3)
    result = estimate(config, **STEP)
    asked = []

    def measured(config, training, memsave):
        asked.append(memsave)
        return {"kept": result.stock.kept, "peak": result.stock.peak + WORKSPACES}

    monkeypatch.setattr(module, "_on_cuda", measured)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (result.stock.peak - 1, 2**30))
    found = check(config, result, Training(**STEP), MemSaveConfig())
    assert asked == [MemSaveConfig()]  # stock is too large
    assert found["patched"].predicted == {"kept": result.patched.kept, "peak": result.patched.peak + WORKSPACES}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 2**30))
    with pytest.raises(MeasureError, match="are free for this machine's cuda"):
        check(config, result, Training(**STEP), None)


def test_what_is_allowed_has_an_end():
    for device, slack in SLACK.items():
        for what, share in slack.items():
            for sign in (-1, 1):
                for times, agrees in ((0.9, True), (1.1, False)):
                    measured = {"kept": 10**6, "peak": 10**6}
                    predicted = measured | {what: round(10**6 * (1 + sign * times * share))}
                    assert Check(device=device, predicted=predicted, measured=measured).agrees is agrees


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("lora", [[], ["--lora", "r=16,dropout=0.05"]], ids=str)
def test_a_step_on_cuda_takes_what_was_predicted(lora, tmp_path, capsys):
    wide = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 2816, "vocab_size": 32000}
    AutoConfig.for_model("llama", **wide, num_hidden_layers=11).save_pretrained(tmp_path)
    argv = ["estimate", tmp_path, "--batch-size", 4, "--seq-len", 1024, "--check", *lora]
    assert main([*map(str, argv)]) == 0, capsys.readouterr().out
