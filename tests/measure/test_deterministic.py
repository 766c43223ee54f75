"""Equality under deterministic kernels, and where stock differs from itself: its own distance is the measure."""

import contextlib
import json
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend

from hf_memsave.cli import main
from hf_memsave.errors import MeasureError
from hf_memsave.measure import step as module
from hf_memsave.measure.deterministic import deterministic_kernels
from hf_memsave.measure.step import DISTANCES, TOLERANCE, compare_step
from support.planted import plant_wrong_gradient

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
TINY = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 64}
KERNELS = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}


def settings():
    return (
        torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark, os.environ.get(VARIABLE), *(is_on() for is_on in KERNELS.values()),
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


def test_an_op_without_a_fixed_order_raises_inside():
    x = torch.zeros(4).put_(torch.tensor([0]), torch.ones(1), accumulate=False)
    with deterministic_kernels(), pytest.raises(RuntimeError, match="deterministic"):
        x.put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)


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
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **TINY}))
    before = settings()
    status = main(["verify", str(tmp_path / "config.json"), *options])
    assert settings() == before
    output, error = capsys.readouterr()
    return status, " ".join(output.split()), error


def test_the_command_asks_for_bits(tmp_path, capsys, monkeypatch):
    seen, stock = [], F.scaled_dot_product_attention

    def attention(*args, **kwargs):
        seen.append(settings())
        return stock(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    status, output, error = verify(tmp_path, capsys, "--deterministic")
    assert (status, error) == (0, "")
    assert "deterministic algorithms" in output and "Equal to the last bit" in output
    assert seen and set(seen) == {DETERMINISTIC}


def test_the_command_sees_a_wrong_gradient_and_restores(tmp_path, capsys, monkeypatch):
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
    assert found.tolerance == DISTANCES * found.repeat
    assert not found.loss.equal and found.differing == ()
    plant_wrong_gradient(monkeypatch, "down.weight")
    found = compare_step(Noisy(1e-4), X)
    assert [d.name for d in found.differing] == ["down.weight"]
    assert found.differing[0].relative > 100 * found.tolerance


def test_a_difference_of_the_size_of_the_old_tolerance_is_seen(on_cuda, monkeypatch):
    stock, calls = module._step, []

    def step(*args):
        found = stock(*args)
        calls.append(1)
        return {n: g * (1 + 5e-4 * (len(calls) == 3)) for n, g in found.items()}  # the patched one

    monkeypatch.setattr(module, "_step", step)
    assert compare_step(Noisy(1e-5), X).differing


def test_bits_are_asked_of_stock_that_repeats_itself(on_cuda, monkeypatch):
    assert compare_step(Noisy(0.0), X).tolerance == 0
    plant_wrong_gradient(monkeypatch, "down.weight")
    assert compare_step(Noisy(0.0), X).differing


def test_stock_too_far_from_itself_tells_nothing(on_cuda):
    with pytest.raises(MeasureError, match=r"stock does not repeat itself.*less than 0.001.*use deterministic kernels"):
        compare_step(Noisy(0.3), X)
    with deterministic_kernels(), pytest.raises(MeasureError, match="Expected equal bits"):
        compare_step(Noisy(1e-5), X)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_bits_are_equal(tmp_path, capsys):
    status, output, error = verify(tmp_path, capsys, "--deterministic", "--device", "cuda")
    assert (status, error) == (0, "") and "Equal to the last bit" in output
