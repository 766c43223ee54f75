"""Comparing a step, stock and patched: equal where it is, a planted difference is seen, and no trace is left."""

import contextlib
import ctypes
import os
import random

import numpy
import pytest
import torch
from torch import nn

import hf_memsave
from hf_memsave.errors import MeasureError
from hf_memsave.measure import step as module
from hf_memsave.measure.step import TOLERANCE, Difference, compare_step, deterministic_kernels
from hf_memsave.patching.swap import is_patched
from support.steps import state_of
from support.zoo import Size, build

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
IDS = torch.arange(12).reshape(2, 6) + 3
X = {"x": torch.randn(32, 64, generator=torch.Generator().manual_seed(1))}


class Net(nn.Module):
    """Writes to an activation after its use; ``noise`` is in its gradients, as where kernels add in no fixed order."""

    def __init__(self, noise=0.0, write=lambda hidden: None):
        super().__init__()
        self.noise, self.write, self.draws = noise, write, torch.Generator().manual_seed(0)
        self.up, self.act, self.down = nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)

    def forward(self, x):
        hidden = self.up(x)
        output = self.down(self.act(hidden))
        self.write(hidden)
        noise = 1 + self.noise * torch.randn(output.shape, generator=self.draws)
        return {"loss": (output * noise).square().mean()}


def plant_wrong_gradient(monkeypatch, parameter, but_for=...):
    """In ``compare_step``, patched gradients of such parameters are half as large again, but for one config."""
    patch = module.patch

    def wrong_patch(model, config):
        report = patch(model, config)
        for name, tensor in model.named_parameters():
            if name.endswith(parameter) and config != but_for:
                tensor.register_hook(lambda gradient: gradient * 1.5)
        return report

    monkeypatch.setattr(module, "patch", wrong_patch)


@pytest.fixture
def on_cuda(monkeypatch):
    """The rule of CUDA, for a model on the CPU."""
    monkeypatch.setattr(module, "device_of", lambda model: "cuda")


def test_compare_step_sees_a_wrong_gradient_and_how_wrong_it_is(monkeypatch):
    plant_wrong_gradient(monkeypatch, "down.weight", but_for={"activation": "stock"})
    found = compare_step(Net(), X).differing
    assert [(d.name, d.relative) for d in found] == [("down.weight", pytest.approx(0.5))]
    assert compare_step(Net(), X, {"activation": "stock"}).differing == ()


def double_unseen(x):
    numbers = (ctypes.c_float * x.numel()).from_address(x.untyped_storage().data_ptr())
    numbers[:] = [2 * number for number in numbers]


@pytest.mark.parametrize(
    ("write", "wrong"),
    [(lambda x: x.data.mul_(2), []), (lambda x: x.detach().numpy().__imul__(2), []), (double_unseen, ["down.weight"])],
    ids=["data", "numpy", "storage"],
)
def test_a_write_that_nothing_sees_is_revealed(write, wrong):
    found = compare_step(Net(write=write), X)
    assert [d.name for d in found.differing] == wrong and found.loss.equal


def test_a_gradient_that_the_patched_step_lacks_is_seen():
    class Lacking(Net):
        def forward(self, x):
            hidden = self.up(x)
            return {"loss": self.down(hidden.detach() if is_patched(self) else hidden).sum()}

    found = compare_step(Lacking(), X).differing
    assert {(d.name, d.relative) for d in found} == {("up.weight", torch.inf), ("up.bias", torch.inf)}


@pytest.mark.parametrize(("config", "fails"), [(None, True), (None, False), ({"activation": "stock"}, False)])
def test_compare_step_leaves_everything_as_it_was(config, fails):
    model = build("bert", Size())
    model.bert.eval()
    model.register_buffer("calls", torch.zeros(()))
    model.register_buffer("wide", torch.full((1,), torch.nan).expand(3))  # it cannot be written to
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    model.register_forward_hook(lambda module, args, output: module.calls.add_(1) and None)
    if config:
        hf_memsave.patch(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    kept = [*model.buffers(), *(p.grad for p in model.parameters())]
    before = state_of(model), [m.training for m in model.modules()]
    states = torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())
    batch = {"input_ids": IDS} | ({} if fails else {"labels": torch.tensor([0, 1])})
    with pytest.raises(MeasureError, match="Add 'labels' to the batch") if fails else contextlib.nullcontext():
        assert compare_step(model, batch, seed=1).differing == ()
    assert (state_of(model), [m.training for m in model.modules()]) == before and model.calls == 0
    now = [*model.buffers(), *(p.grad for p in model.parameters())]
    assert all(a is b for a, b in zip(now, kept, strict=True)) and all((p.grad == 1).all() for p in model.parameters())
    assert (torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())) == states


@pytest.mark.parametrize(
    ("x", "message"),
    [(0.0, "all gradients are zero"), (float("nan"), "is not finite"), (None, "parameters .* that require a gradient")],
)
def test_compare_step_refuses_to_compare_nothing(x, message):
    model = Net().requires_grad_(False)
    model.up.weight.requires_grad_(x is not None)  # its gradient is the input, times something
    with pytest.raises(MeasureError, match=message):
        compare_step(model, {"x": torch.full((4, 64), x or 0.0)})


def test_a_tolerance_counts_only_where_there_is_one():
    signs, near, far = (Difference("a", False, relative) for relative in (0.0, TOLERANCE / 2, 1.0))
    loss, gradients = Difference("loss", True, 0.0), (signs, near, far)
    both = dict(losses=(1, 1), loss=loss, gradients=gradients, repeat=0, stock=None, patched=None)
    assert module.StepComparison(**both, tolerance=0.0).differing == (far, near, signs)
    assert module.StepComparison(**both, tolerance=TOLERANCE).differing == (far,)


def test_stocks_own_distance_is_the_measure_and_what_is_further_is_seen(on_cuda, monkeypatch):
    found = compare_step(Net(1e-4), X)
    assert 0 < found.repeat < TOLERANCE and found.tolerance == module.DISTANCES * found.repeat
    assert not found.loss.equal and found.differing == ()
    plant_wrong_gradient(monkeypatch, "down.weight")
    found = compare_step(Net(1e-4), X)
    assert [d.name for d in found.differing] == ["down.weight"]
    assert found.differing[0].relative > 100 * found.tolerance


@pytest.mark.parametrize(("noise", "planted"), [(1e-5, 5e-4), (0.0, 1e-6)])
def test_a_small_difference_is_seen_where_stock_repeats_itself(noise, planted, on_cuda, monkeypatch):
    stock, calls = module.loss_of, []

    def loss_of(*args):
        calls.append(1)
        return stock(*args) * (1 + planted * (len(calls) == 3))  # the patched one

    assert (compare_step(Net(noise), X).tolerance == 0) == (noise == 0)
    monkeypatch.setattr(module, "loss_of", loss_of)
    assert compare_step(Net(noise), X).differing


def test_stock_too_far_from_itself_tells_nothing(on_cuda, monkeypatch):
    with pytest.raises(MeasureError, match=r"stock does not repeat itself.*less than 0.001.*use deterministic kernels"):
        compare_step(Net(0.3), X)
    with deterministic_kernels(), pytest.raises(MeasureError, match="Expected equal bits"):
        compare_step(Net(1e-5), X)
    monkeypatch.undo()
    with pytest.raises(MeasureError, match=r"stock does not repeat itself.*Expected equal bits.*set OMP_NUM_THREADS=1"):
        compare_step(Net(1e-5), X)


def settings():
    is_on = (getattr(torch.backends.cuda, f"{k}_sdp_enabled")() for k in ("flash", "mem_efficient", "cudnn", "math"))
    return torch.get_deterministic_debug_mode(), os.environ.get(VARIABLE), *is_on


def test_kernels_are_chosen_and_cublas_is_asked_for_while_it_can_be(monkeypatch, request):
    monkeypatch.delenv(VARIABLE, raising=False)
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.use_deterministic_algorithms(True, warn_only=True)
    before = settings()
    with contextlib.suppress(ZeroDivisionError), deterministic_kernels():
        assert settings() == (2, ":4096:8", False, False, False, True)
        raise ZeroDivisionError
    assert settings() == before
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    message = f"expected {VARIABLE}=:4096:8 before CUDA is used, got None"
    with pytest.raises(MeasureError, match=message), deterministic_kernels():
        pass
    assert settings() == before
    monkeypatch.setenv(VARIABLE, ":16:8")
    with deterministic_kernels():
        assert os.environ[VARIABLE] == ":16:8"
    assert os.environ[VARIABLE] == ":16:8"
