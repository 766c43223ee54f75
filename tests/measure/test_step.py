"""Comparing a step, stock and patched: equal where it is, a planted difference is seen, and no trace is left.

Bits are asked for under deterministic kernels; where stock differs from itself, its own distance is the measure.
"""

import contextlib
import os
import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertForSequenceClassification

import hf_memsave
from hf_memsave.cli import main
from hf_memsave.errors import MeasureError
from hf_memsave.measure import step as module
from hf_memsave.measure.step import TOLERANCE, Difference, compare_step, deterministic_kernels
from hf_memsave.patching.swap import is_patched
from support.planted import plant_wrong_gradient
from support.steps import state_of
from support.zoo import Size, build, config_of

TINY = config_of("bert", Size(layers=1), attention_probs_dropout_prob=0.1)
VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
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
    model, other = (BertForSequenceClassification(TINY).train() for _ in range(2))
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
    assert module.StepComparison(**both, tolerance=0.0).differing == (far, near)
    assert (found := module.StepComparison(**both, tolerance=TOLERANCE)).differing == (far,)
    assert "loss equal, 0 of 2 gradients equal to the bit; stock Kept(0 bytes in 0 storages)" in repr(found)


def test_compare_step_tells_a_step_that_fails_stock_or_does_not_repeat_itself():
    with pytest.raises(module.StockStepError, match=r"cannot run a stock step on pixels \[2, 6\]: "):
        compare_step(build("bert", Size()), {"pixels": IDS})
    noise = iter(range(1, 100))
    with pytest.raises(MeasureError, match=r"stock does not repeat itself.*Expected equal bits"):
        compare_step(Writer(lambda hidden: hidden.data.mul_(next(noise))), {"x": torch.randn(4, 8)})


def settings():
    is_on = torch.backends.cuda
    kernels = is_on.flash_sdp_enabled, is_on.mem_efficient_sdp_enabled, is_on.cudnn_sdp_enabled, is_on.math_sdp_enabled
    return (
        torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark, os.environ.get(VARIABLE), *(kernel() for kernel in kernels),
    )  # fmt: skip


DETERMINISTIC = (True, False, False, ":4096:8", False, False, False, True)


@pytest.fixture(autouse=True)
def without_cublas(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.mark.parametrize(("fails", "warns"), [(False, True), (True, False)])
def test_settings_are_there_inside_and_restored(fails, warns, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    if warns:
        torch.use_deterministic_algorithms(True, warn_only=True)
    before = settings()
    try:
        with contextlib.suppress(ZeroDivisionError), deterministic_kernels():
            assert settings() == DETERMINISTIC
            if fails:
                raise ZeroDivisionError
        assert settings() == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_cublas_is_asked_for_while_it_can_be(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    before = settings()
    with pytest.raises(MeasureError, match=rf"expected {VARIABLE}=:4096:8 before CUDA is used, got None"):
        with deterministic_kernels():
            pass
    assert settings() == before
    monkeypatch.setenv(VARIABLE, ":16:8")
    with deterministic_kernels():
        assert os.environ[VARIABLE] == ":16:8"
    assert os.environ[VARIABLE] == ":16:8"


def verify(tmp_path, capsys, *options):
    TINY.save_pretrained(tmp_path)
    before = settings()
    status = main(["verify", str(tmp_path / "config.json"), *options])
    assert settings() == before
    output, error = capsys.readouterr()
    return status, " ".join(output.split()), error


def test_the_command_asks_for_bits_and_sees_a_wrong_gradient(tmp_path, capsys, monkeypatch):
    seen, stock = [], F.scaled_dot_product_attention

    def attention(*args, **kwargs):
        seen.append(settings())
        return stock(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    status, output, error = verify(tmp_path, capsys, "--deterministic")
    assert (status, error) == (0, "")
    assert "deterministic algorithms" in output and "Equal to the last bit" in output
    assert seen and set(seen) == {DETERMINISTIC}
    plant_wrong_gradient(monkeypatch)
    status, output, error = verify(tmp_path, capsys, "--deterministic")
    assert status == 1 and "Different: " in output and "expected equal bits" in error


def test_an_op_without_a_deterministic_form_is_told(tmp_path, capsys, monkeypatch):
    from transformers.models.bert import modeling_bert

    def forward(self, hidden_states):
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
        return hidden_states

    monkeypatch.setattr(modeling_bert.BertPooler, "forward", forward)
    monkeypatch.setattr(modeling_bert.BertIntermediate, "forward", forward)
    status, output, error = verify(tmp_path, capsys, "--deterministic")
    assert (status, output) == (2, "")
    assert "does not have a deterministic implementation" in error and "Leave --deterministic out" in error


class Noisy(nn.Module):
    """Gradients differ each time by ``noise`` of themselves, as where kernels add in no fixed order."""

    def __init__(self, noise):
        super().__init__()
        self.noise, self.up, self.act, self.down = noise, nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)
        self.draws = torch.Generator().manual_seed(0)

    def forward(self, x):
        hidden = self.up(x)
        output = self.down(self.act(hidden))
        noise = 1 + self.noise * torch.randn(output.shape, generator=self.draws)
        return {"loss": (output * noise).square().mean()}


@pytest.fixture
def on_cuda(monkeypatch):
    """The rule of CUDA, for a model on the CPU."""
    monkeypatch.setattr(module, "device_of", lambda model: "cuda")


X = {"x": torch.randn(32, 64, generator=torch.Generator().manual_seed(1))}


def test_stocks_own_distance_is_the_measure_and_what_is_further_is_seen(on_cuda, monkeypatch):
    found = compare_step(Noisy(1e-4), X)
    assert 0 < found.repeat < TOLERANCE
    assert found.tolerance == module.DISTANCES * found.repeat
    assert not found.loss.equal and found.differing == ()
    plant_wrong_gradient(monkeypatch, "down.weight")
    found = compare_step(Noisy(1e-4), X)
    assert [d.name for d in found.differing] == ["down.weight"]
    assert found.differing[0].relative > 100 * found.tolerance


@pytest.mark.parametrize(("noise", "planted"), [(1e-5, 5e-4), (0.0, 1e-6)])
def test_a_small_difference_is_seen_where_stock_repeats_itself(noise, planted, on_cuda, monkeypatch):
    stock, calls = module._step, []

    def step(*args):
        found = stock(*args)
        calls.append(1)
        return {n: g * (1 + planted * (len(calls) == 3)) for n, g in found.items()}  # the patched one

    assert (compare_step(Noisy(noise), X).tolerance == 0) == (noise == 0)
    monkeypatch.setattr(module, "_step", step)
    assert compare_step(Noisy(noise), X).differing


def test_stock_too_far_from_itself_tells_nothing(on_cuda):
    with pytest.raises(MeasureError, match=r"stock does not repeat itself.*less than 0.001.*use deterministic kernels"):
        compare_step(Noisy(0.3), X)
    with deterministic_kernels(), pytest.raises(MeasureError, match="Expected equal bits"):
        compare_step(Noisy(1e-5), X)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_bits_are_equal(tmp_path, capsys):
    status, output, error = verify(tmp_path, capsys, "--deterministic", "--device", "cuda")
    assert (status, error) == (0, "") and "Equal to the last bit" in output
