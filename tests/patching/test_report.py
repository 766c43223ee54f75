"""The report of ``patch``: what it covers, what the first step kept and avoided, and a warning where that is little."""

import copy
import html
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave import WTACRS, MemSaveConfig, measure_kept, patch, unpatch
from hf_memsave.arch.versions import enable_checkpointing
from hf_memsave.config.sizes import gib
from hf_memsave.logs import warn_once
from hf_memsave.tape.kinds import WORDS
from support.helpers import only_on_cpu, random
from support.steps import patched_classes, state_of, step
from support.zoo import Size, batch_for, build

MIB = 2**20


def test_the_report_reads_as_a_table_and_says_what_is_approximate(llama, device):
    lines = str(patch(llama, MemSaveConfig(norm="stock"))).splitlines()
    assert lines == [
        "hf_memsave: 1 model and 2 repeated blocks covered, 0 modules skipped",
        "  patched     5 x quiet              LlamaRMSNorm",
        "  what it frees is counted in the first training step",
    ]
    text = str(patch(build("bert").to(device), MemSaveConfig(activation="invert", storage="int8")))
    assert "  patched     2 x activation         GELUActivation" in text
    assert '  gradients are not exact: activation="invert", storage="int8"' in text
    assert "stored in 8 bits" in text


def test_what_is_not_exact_is_said_once_and_what_is_exact_is_not(device, said):
    warn_once.cache_clear()
    for config in (True, "max", "tempo", "tempo", MemSaveConfig(linear=WTACRS(budget=0.1))):
        patch(build("bert").to(device), config)
    assert said() == [
        'hf_memsave: gradients are not exact: activation="invert", norm="output"',
        "hf_memsave: gradients are not exact: linear=WTACRS(budget=0.1)",
    ]


def test_the_report_says_why_a_module_is_skipped(device):
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(inplace=True)).to(device)
    report = patch(model, {"activation": "invert"})
    (skipped,) = report.skipped
    assert (skipped.name, skipped.reason) == ("1", "it works in place (inplace=True), so its input is gone")
    assert f"  skipped     1 x activation         SiLU: {skipped.reason}" in str(report)


def test_what_is_kept_instead_of_a_tensor_is_less_avoided(device):
    only_on_cpu(device, "this count of bytes")
    frozen = nn.Conv2d(8, 8, 3).requires_grad_(False)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), frozen, nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    x = random(2, 3, 32, 32)
    stock = measure_kept(model, x).total
    report = patch(model)
    kept = measure_kept(model, x).total
    assert report.step.nbytes_avoided == stock - kept > stock / 2


class Sublayer(nn.Module):
    """Of the kinds that a block has: an MLP, a dropout, a residual and a norm."""

    def __init__(self):
        super().__init__()
        self.up, self.act, self.dropout, self.down = nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + self.down(self.dropout(self.act(self.up(x))))).view(-1).square()


def test_a_kind_is_that_of_the_op_that_made_what_is_kept(device):
    only_on_cpu(device, "this count of bytes")
    model = Sublayer()
    report = patch(model)
    model(random(16, 8)).sum().backward()
    kept, avoided = (report.step.by_kind(what) for what in ("kept", "avoided"))
    wide, narrow, bits = 16 * 32 * 4, 16 * 8 * 4, 16 * 32 // 8
    del kept["other"]
    assert kept == {"activations": wide, "residual sums": narrow, "norms": 16 * 2 * 4, "dropout masks": bits}
    assert avoided == {"dropouts": wide, "dropout masks": wide - bits, "norms": narrow}


def test_kinds_add_up_the_most_first(llama):
    report = patch(llama)
    step(llama, batch_for(llama))
    share = report.step.nbytes_avoided / (report.step.nbytes_avoided + report.step.nbytes_kept)
    assert report.step.freed_fraction == pytest.approx(share)
    kept, avoided = (report.step.by_kind(what) for what in ("kept", "avoided"))
    assert sum(kept.values()) == report.step.nbytes_kept and sum(avoided.values()) >= report.step.nbytes_avoided
    for found in (kept, avoided):
        assert list(found.values()) == sorted(found.values(), reverse=True)
    assert {"activations", "norms"} <= avoided.keys() and "embeddings" in kept
    text, page = str(report), report._repr_html_()
    for name, n in (*list(avoided.items())[:2], *list(kept.items())[:2]):
        assert name in WORDS.values() and f"{name} {gib(n)}" in text and f"<th>{html.escape(name)}</th>" in page
    assert f"{share:.0%} freed (" in text and "  kept: " in text
    assert repr(report).count("\n") == 0 and f"{share:.0%} freed" in repr(report) and "made by" not in text


def test_only_a_forward_with_gradients_is_counted_and_only_the_first(llama):
    report, batch = patch(llama), batch_for(llama)
    with torch.no_grad():
        llama.eval()(**batch)
    assert not report.step.nbytes_kept
    step(llama.train(), batch)
    before = report.step.nbytes_kept, report.step.nbytes_avoided
    step(llama, batch_for(llama, Size(batch=4)))
    assert (report.step.nbytes_kept, report.step.nbytes_avoided) == before != (0, 0)


def test_a_patch_that_changes_something_counts_again_and_a_copy_does_not_count_for_its_original(llama):
    first = patch(llama)
    other = copy.deepcopy(llama)
    step(other, batch_for(other))
    assert not first.step.nbytes_kept
    step(llama, batch_for(llama))
    assert first.step.nbytes_kept and patch(llama).step is first.step
    wrapped = get_peft_model(llama, LoraConfig())
    assert not patch(wrapped).step.is_counted, "with adapters it is another model"
    second = patch(llama := wrapped.unload().requires_grad_(), {"norm": "stock"}, replace=True)
    assert not second.step.nbytes_kept
    step(llama, batch_for(llama))
    assert 0 < second.step.nbytes_avoided < first.step.nbytes_avoided


def test_a_forward_within_the_callers_checkpoint_is_not_counted_and_the_report_says_why(device):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).to(device)
    report = patch(model)
    x = torch.randn(2, 8, device=device, requires_grad=True)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert not report.step.is_counted
    assert "is not counted: it runs within gradient checkpointing" in str(report)
    model(x).sum().backward()
    assert report.step.is_counted and "the first step keeps" in str(report)
    unpatch(model)
    report = patch(model)
    model(torch.zeros(0, 8, device=device)).sum().backward()
    assert report.step.is_counted and report.step.nbytes_kept == 0
    assert "not called" not in str(report) and "the first step keeps nothing for backward as stock does" in str(report)


@pytest.mark.parametrize("first", ["compare", "step"])
def test_compare_measures_stock_and_patched_and_leaves_the_model_patched(first, llama):
    batch = batch_for(llama)
    stock = copy.deepcopy(llama)
    report = patch(llama)
    before = state_of(llama)
    with pytest.raises(ValueError, match="input_ids"):
        report.compare({})
    assert state_of(llama) == before
    if first == "step":
        step(llama, batch)
    before = patched_classes(llama)
    comparison = report.compare(batch)
    assert comparison.stock.total == measure_kept(stock, batch).total
    assert comparison.patched.total == measure_kept(llama, batch).total
    assert comparison.freed == comparison.stock.total - comparison.patched.total > comparison.patched.total / 2
    assert patched_classes(llama) == before
    step(llama, batch)
    assert report.step.nbytes_avoided
    report = patch(build("phi"))  # which is gone by now
    with pytest.raises(ReferenceError, match="no longer exists"):
        report.compare({})
    report.undo()  # nothing to undo


def block_of(name):
    """A class named Block, as two of Transformers' families may have, in a module of this name."""
    body = {"__module__": name, "forward": lambda self, x: self.act(self.norm(x))}
    cls = type("Block", (GradientCheckpointingLayer,), body)
    block = cls()
    block.norm, block.act = nn.LayerNorm(4), type("Act", (nn.SiLU,), {"__module__": name})()
    return block


def test_classes_of_one_name_are_told_apart_by_their_module(device):
    model = nn.Sequential(block_of("vision"), block_of("text"), nn.Linear(4, 4))
    report = patch(model.to(device), MemSaveConfig(checkpoint="block"))
    lines = [line.split(" x ")[1] for line in str(report).splitlines() if "run_again" in line]
    assert [line.split()[1] for line in lines] == ["text.Block", "vision.Block"]
    report = patch(nn.Sequential(block_of("text"), block_of("text").norm), MemSaveConfig(checkpoint="block"))
    assert " Block" in str(report) and "text" not in str(report)


class Linears(nn.Module):
    """Keeps the input of each linear, which cannot be had for less."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def forward(self, x):
        return {"loss": self.layers(x).sum()}


def test_a_model_where_little_is_avoided_gets_one_warning_that_says_where_its_bytes_are(said, device):
    model = Linears().to(device)
    report = patch(model)
    for _ in range(3):
        model(torch.randn(32, 64, device=device))["loss"].backward()
    assert report.step.nbytes_avoided < 0.05 * report.step.nbytes_kept
    (message,) = said("hf_memsave freed")
    assert "most of it linear layers " in message and "Linears" in message


@pytest.mark.parametrize(
    ("family", "checkpointing", "is_warned_of"), [("phi", False, True), ("phi", True, False), ("llama", False, False)]
)
def test_everything_left_to_stock_is_no_error_and_warned_of_where_nothing_is_avoided(
    family, checkpointing, is_warned_of, said
):
    """But where the caller's checkpointing decides what is kept."""
    model = build(family)
    if checkpointing:
        enable_checkpointing(model)
    patch(model, dict.fromkeys(("norm", "activation", "dropout", "attention", "lora"), "stock") | {"frozen": False})
    for _ in range(2):
        step(model, batch_for(model))
    found = [re.search(r"\w+ForCausalLM", message)[0] for message in said("hf_memsave freed")]
    assert found == ["PhiForCausalLM"] * is_warned_of


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_where_much_is_avoided_gets_none(checkpointing, said, llama):
    if checkpointing:
        enable_checkpointing(llama)
    patch(llama)
    step(llama, batch_for(llama))
    assert said("hf_memsave freed") == []


def test_offload_says_what_lies_where(device):
    only_on_cpu(device, "this count of bytes")
    size = Size(hidden=64, layers=2, batch=2, seq=128)
    model = build("bert", size)
    report = patch(model, MemSaveConfig(offload=True))
    step(model, batch_for(model, size))
    assert report.step.nbytes_offloaded > 20 * report.step.nbytes_kept > 0
    where = " (which on a CPU is the device's own)" * (device.type == "cpu")
    assert f" in main memory{where}, where stock " in str(report) and "    in main memory: a" in str(report)
