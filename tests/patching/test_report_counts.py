"""What a report says of the first step is what an independent count finds: kept here, and kept by stock."""

import contextlib
import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memsave import WTACRS, MemSaveConfig, measure_kept, patch
from hf_memsave.ops import chunked_loss
from support.families import Size, batch_for, build
from support.helpers import only_on_cpu

SIZE = Size(hidden=64, heads=4, layers=2, batch=2, seq=128)
SETTINGS = {
    "exact": {}, **{rung: {"checkpoint": rung} for rung in ("o_proj", "qkv", "up", "gate", "block")},
    "offload": {"offload": True}, "offload and gate": {"offload": True, "checkpoint": "gate"},
    "int8": {"storage": "int8"}, "int4": {"storage": "int4"},
    "invert": {"activation": "invert"}, "precision_bit": {"activation": "precision_bit"},
    "few_bit": {"activation": "few_bit"}, "output": {"norm": "output"},
    "mask": {"dropout": "mask"}, "dropout of stock": {"dropout": "stock"},
    "sampled": {"linear": WTACRS()}, "stock": dict.fromkeys(("norm", "activation", "dropout", "attention"), "stock"),
    "offloaded codes": {"offload": True, "storage": "int8"},
    "few bits in blocks that run again": {"checkpoint": "block", "activation": "few_bit"},
    **{preset: preset for preset in ("tempo", "invact", "selective", "few-bit", "wta-crs", "lora-wta-crs", "max")},
}  # fmt: skip
#: Tried with every family each time; the others with ``-m matrix``.
OFTEN = {"exact", "gate", "block", "offload", "int8", "sampled", "tempo"}


def cases():
    for family in ("bert", "llama", "t5-encoder"):
        for lora in (False, True):
            for name in SETTINGS:
                rare = name not in OFTEN or family == "t5-encoder"
                id_ = f"{family}-{'lora' if lora else 'full'}-{name}"
                yield pytest.param(family, lora, name, id=id_, marks=[pytest.mark.matrix] if rare else [])


def make(family, lora, device="cpu"):
    model = build(family, SIZE)
    return (get_peft_model(model, LoraConfig()).train() if lora else model).to(device)


def config_of(name):
    value = SETTINGS[name]
    return value if isinstance(value, str) else MemSaveConfig(**value)


def counted(model, config, batch, context=contextlib.nullcontext):
    """The report of a patched model, after what stock keeps and what it keeps itself were measured."""
    with context():
        stock = measure_kept(model, batch).total
        report = patch(model, config)
        return stock, measure_kept(model, batch).total, report.step


def check(stock, kept, step):
    assert step.nbytes_kept + step.nbytes_offloaded == pytest.approx(kept, rel=0.02)
    assert step.nbytes_kept + step.nbytes_offloaded + step.nbytes_avoided == pytest.approx(stock, rel=0.02)


@pytest.mark.parametrize(("family", "lora", "name"), cases())
def test_kept_and_avoided_are_what_stock_keeps(family, lora, name, device):
    only_on_cpu(device, "this count of bytes")
    model = make(family, lora)
    check(*counted(model, config_of(name), batch_for(model, SIZE)))


@pytest.mark.parametrize("name", ["exact", "gate", "sampled"])
def test_under_autocast_too(name, device):
    only_on_cpu(device, "this count of bytes")
    model = make("bert", False)
    check(*counted(model, config_of(name), batch_for(model, SIZE), lambda: torch.autocast("cpu", torch.bfloat16)))


def test_stock_is_the_model_with_its_own_gradient_checkpointing(device):
    only_on_cpu(device, "this count of bytes")
    model = make("llama", False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    stock, kept, step = counted(model, True, batch_for(model, SIZE))
    check(stock, kept, step)
    assert not step.is_checkpointed and step.nbytes_avoided < 0.2 * stock


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_logits_that_are_not_computed_are_avoided(lora, device, monkeypatch):
    only_on_cpu(device, "this count of bytes")
    monkeypatch.setattr(chunked_loss, "CHUNK", 2**20)
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4000, **sizes)).train()
    model = get_peft_model(model, LoraConfig()).train() if lora else model
    x = torch.randint(0, 4000, (2, 100))
    stock, kept, step = counted(model, True, {"input_ids": x, "labels": x, "use_cache": False})
    check(stock, kept, step)
    assert step.is_loss_chunked and step.by_function("avoided")["cross_entropy"] > 0.8 * stock


def test_offload_says_what_lies_where(device):
    only_on_cpu(device, "this count of bytes")
    model = make("bert", False)
    report = patch(model, MemSaveConfig(offload=True))
    model(**batch_for(model, SIZE)).loss.backward()
    step = report.step
    assert step.nbytes_offloaded > 20 * step.nbytes_kept > 0
    assert "in main memory" in str(report) and "most offloaded: " in str(report)


def test_a_forward_within_the_callers_checkpoint_is_not_counted_and_the_report_says_why(device):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).to(device)
    report = patch(model)
    x = torch.randn(2, 8, device=device, requires_grad=True)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert not report.step.is_counted
    assert "is not counted: it runs within gradient checkpointing" in str(report)
    model(x).sum().backward()
    assert report.step.is_counted and "first step: " in str(report)


def test_zero_is_counted(device):
    model = nn.Sequential(nn.Linear(8, 8)).to(device)
    report = patch(model)
    model(torch.zeros(0, 8, device=device)).sum().backward()
    assert report.step.is_counted and report.step.nbytes_kept == 0
    assert "not called" not in str(report) and "first step: 0.0 MiB kept" in str(report)


# Beside an exact setting


@pytest.fixture
def said(caplog):
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.WARNING):
        yield lambda: [r.getMessage() for r in caplog.records if "frees nothing" in r.getMessage()]
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("family", "lora", "name", "frees"),
    [("bert", False, "int8", True), ("bert", False, "invert", False), ("bert", True, "few_bit", True),
     ("bert", False, "few_bit", False), ("bert", False, "sampled", False), ("t5-encoder", False, "sampled", True),
     ("llama", False, "output", False)],
)  # fmt: skip
def test_what_frees_nothing_beside_an_exact_setting_says_so_with_both_numbers(family, lora, name, frees, said, device):
    only_on_cpu(device, "this count of bytes")
    batch = batch_for(make(family, lora), SIZE)
    _, exact, _ = counted(make(family, lora), True, batch)
    model = make(family, lora)
    report = patch(model, config_of(name))
    for _ in range(2):
        model(**batch).loss.backward()
    assert report.step.nbytes_exact == pytest.approx(exact, rel=0.02)
    assert len(said()) == (not frees)
    for message in said():
        assert f"kept {report.step.nbytes_kept / 2**20:.2f} MiB" in message
        assert f"an exact setting keeps {report.step.nbytes_exact / 2**20:.2f} MiB" in message
