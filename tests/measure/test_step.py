"""Comparing a step, stock and patched: equal where it is, a planted difference is seen, and no trace is left."""

import contextlib
import random

import numpy
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import hf_memsave
from hf_memsave.errors import MeasureError
from hf_memsave.measure.step import TOLERANCE, Difference, StepComparison, StockStepError, compare_step
from hf_memsave.patching.swap import is_patched
from support.families import Size, build
from support.planted import plant_wrong_gradient
from support.steps import state_of

TINY = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 64}
IDS = torch.arange(12).reshape(2, 6) + 3
BATCH = {"input_ids": IDS, "labels": torch.tensor([0, 1])}


class Writer(nn.Module):
    """A model whose forward writes to an activation after its use: through NumPy, which nothing sees, or ``.data``."""

    def __init__(self, write):
        super().__init__()
        self.write, self.up, self.act, self.down = write, nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.up(x)
        output = self.down(self.act(hidden))
        self.write(hidden)
        return {"loss": output.sum()}


WRITES = {"data": lambda hidden: hidden.data.mul_(2), "numpy": lambda hidden: hidden.detach().numpy().__imul__(2)}


def test_compare_step_sees_a_wrong_gradient_and_how_wrong_it_is(monkeypatch):
    plant_wrong_gradient(monkeypatch, but_for={"activation": "stock"})
    model, other = (BertForSequenceClassification(BertConfig(**TINY)).train() for _ in range(2))
    found = compare_step(model, BATCH).differing
    assert {d.name for d in found} == {f"bert.encoder.layer.0.{n}output.dense.weight" for n in ("", "attention.")}
    assert [d.relative for d in found] == [pytest.approx(0.5)] * 2
    assert compare_step(other, BATCH, {"activation": "stock"}).differing == ()


@pytest.mark.parametrize(("write", "wrong"), [("data", []), ("numpy", ["down.weight"])])
def test_a_write_that_nothing_sees_is_revealed(write, wrong):
    found = compare_step(Writer(WRITES[write]), {"x": torch.randn(4, 8)})
    assert [d.name for d in found.differing] == wrong and found.loss.equal


def test_a_gradient_that_the_patched_step_lacks_is_seen():
    class Lacking(Writer):
        def forward(self, x):
            hidden = self.up(x)
            return {"loss": self.down(hidden.detach() if is_patched(self) else hidden).sum()}

    found = compare_step(Lacking(None), {"x": torch.randn(4, 8)}).differing
    assert {(d.name, d.relative) for d in found} == {("up.weight", torch.inf), ("up.bias", torch.inf)}


@pytest.mark.parametrize(("config", "fails"), [(None, True), ({"activation": "stock"}, False)])
def test_compare_step_leaves_everything_as_it_was(config, fails):
    model = build("bert", Size())
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_hook(lambda module, args, output: module.calls.add_(1) and None)
    if config:
        hf_memsave.patch(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters()]
    before = state_of(model)
    states = (torch.get_rng_state(), random.getstate(), str(numpy.random.get_state()))
    batch = {"input_ids": IDS} | ({} if fails else {"labels": torch.tensor([0, 1])})
    with pytest.raises(MeasureError, match="Add 'labels' to the batch") if fails else contextlib.nullcontext():
        assert compare_step(model, batch).differing == ()
    assert state_of(model) == before and model.calls == 0
    assert all(p.grad is g and bool((g == 1).all()) for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), str(numpy.random.get_state())) == states[1:]


def test_compare_step_tells_a_model_that_does_not_repeat_itself():
    noise = iter(range(1, 100))
    model = Writer(lambda hidden: hidden.data.mul_(next(noise)))
    with pytest.raises(MeasureError, match=r"stock does not repeat itself.*Expected equal bits"):
        compare_step(model, {"x": torch.randn(4, 8)})


@pytest.mark.parametrize(
    ("x", "message"),
    [(0.0, "all gradients are zero"), (float("nan"), "is not finite"), (None, "parameters .* that require a gradient")],
)
def test_compare_step_refuses_to_compare_nothing(x, message):
    model = Writer(lambda hidden: None).requires_grad_(False)
    model.up.weight.requires_grad_(x is not None)  # its gradient is the input, times something
    with pytest.raises(MeasureError, match=message):
        compare_step(model, {"x": torch.full((4, 8), x or 0.0)})


def test_a_tolerance_counts_only_where_there_is_one():
    near, far, equal = Difference("a", False, TOLERANCE / 2), Difference("b", False, 1.0), Difference("c", True, 0.0)
    nothing = hf_memsave.Kept(())
    both = dict(losses=(1, 1), loss=equal, gradients=(near, far), repeat=0, stock=nothing, patched=nothing)
    assert StepComparison(**both, tolerance=0.0).differing == (far, near)
    assert StepComparison(**both, tolerance=TOLERANCE).differing == (far,)


def test_compare_step_tells_a_step_that_fails_stock():
    model = build("bert", Size())
    with pytest.raises(StockStepError, match=r"cannot run a stock step on pixels \[2, 6\]: "):
        compare_step(model, {"pixels": IDS})
