"""Attacks by a newcomer's calls: each error says what was expected, what was found, and the remedy."""

import types

import pytest
import torch
from torch import nn

from hf_memsave import MemSaveError, PatchError, measure_kept, patch, unpatch
from hf_memsave.errors import MeasureError
from support.attacks import WIDTH, Attack
from support.helpers import random

NO_MODELS = {
    "a name": (lambda: "gpt2", "the text 'gpt2'.*Load the model first"),
    "a class": (lambda: nn.Linear, "the class Linear.*Make a model of it first"),
    "nothing": (lambda: None, "None.*Pass the model that you train"),
    "an optimizer": (
        lambda: torch.optim.SGD([nn.Parameter(torch.ones(2))]),
        "class SGD.*Pass the model that you train",
    ),
    "a trainer": (lambda: types.SimpleNamespace(model=nn.Linear(2, 2)), "class SimpleNamespace.*Pass its .model"),
    "parameters": (lambda: nn.Linear(2, 2).parameters(), "class generator.*Pass the model that you train"),
}
CALLS = {"patch": patch, "unpatch": unpatch, "measure_kept": lambda model: measure_kept(model, torch.ones(2))}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", NO_MODELS)
def test_what_is_no_model_is_refused(name, call):
    make, words = NO_MODELS[name]
    with pytest.raises(MemSaveError, match=rf"(?s){call}\(.*expected a torch.nn.Module, got .*{words}") as caught:
        CALLS[call](make())
    assert isinstance(caught.value, MeasureError if call == "measure_kept" else PatchError)


@pytest.fixture
def model(device):
    return Attack(lambda model, x: model.f(x).exp().sin().sum()).to(device)


def test_a_text_is_no_batch(model):
    with pytest.raises(MeasureError, match=r"expected a mapping, list, tuple or tensor, got the text 'a te.*Tokenize"):
        measure_kept(model, "a text" * 1000)


def test_a_model_that_takes_text_is_measured(device):
    model = Attack(lambda model, text: model.f(torch.full((2, WIDTH), float(len(text)), device=device)).exp()).to(
        device
    )
    assert measure_kept(model, ["a text"]).total > 0


@pytest.mark.parametrize("is_patched", [False, True])
def test_nothing_can_be_measured_in_inference_mode(is_patched, model, device):
    x = random(2, WIDTH, device=device)
    if is_patched:
        patch(model)
    kept = measure_kept(model, x)
    with torch.no_grad():
        assert measure_kept(model, x) == kept
    with (
        torch.inference_mode(),
        pytest.raises(MeasureError, match="expected grad mode.*got torch.inference_mode"),
    ):
        measure_kept(model, x)


def test_layers_without_a_shape_are_alive_while_another_model_is_measured(model, device):
    x = random(2, WIDTH, device=device)
    kept = measure_kept(model, x)
    lazy = [nn.LazyLinear(2, device=device), nn.LazyBatchNorm1d(device=device)]
    assert measure_kept(model, x) == kept and all(layer.has_uninitialized_params() for layer in lazy)


def test_the_report_of_a_model_that_is_trained_by_another_method_says_so(model, device):
    x = random(2, WIDTH, device=device)
    report = patch(model)
    assert "counted in the first training step" in str(report)
    model.f(x).sum().backward()  # as Lightning's training_step does
    assert "not called since it was patched, though it got gradients" in str(report)
    assert "counted in the first training step" in str(patch(model)), "it had gradients before"
    report = patch(model)
    model(x).backward()
    assert "first step: " in str(report)
