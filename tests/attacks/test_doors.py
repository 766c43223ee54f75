"""Attacks by a newcomer's calls: each error says what was expected, what was found, and the remedy."""

import types

import pytest
import torch
from torch import nn

from hf_memsave import MemSaveError, PatchError, measure_kept, patch, unpatch
from hf_memsave.errors import MeasureError
from support.attacks import WIDTH, Attack
from support.helpers import random
from support.zoo import batch_for, build

NO_MODELS = {
    "a name": (lambda: "gpt2", "the text 'gpt2'.*Load the model first"),
    "a class": (lambda: nn.Linear, "the class Linear.*Make a model of it first"),
    "nothing": (lambda: None, "None.*Pass the model that you train"),
    "a trainer": (lambda: types.SimpleNamespace(model=nn.Linear(2, 2)), "class SimpleNamespace.*Pass its .model"),
    "parameters": (lambda: nn.Linear(2, 2).parameters(), "class generator.*Pass the model that you train"),
}
CALLS = {"patch": patch, "unpatch": unpatch, "measure_kept": lambda model: measure_kept(model, torch.ones(2))}


@pytest.mark.parametrize("name", NO_MODELS)
def test_what_is_no_model_is_refused(name):
    make, words = NO_MODELS[name]
    for call, function in CALLS.items():
        with pytest.raises(MemSaveError, match=rf"(?s){call}\(.*expected a torch.nn.Module, got .*{words}") as caught:
            function(make())
        assert isinstance(caught.value, MeasureError if call == "measure_kept" else PatchError)


@pytest.fixture
def model(device):
    return Attack(lambda model, x: model.f(x).exp().sin().sum()).to(device)


def test_a_text_is_no_batch_but_what_a_model_may_take(model, device):
    with pytest.raises(MeasureError, match=r"expected a mapping, list, tuple or tensor, got the text 'a te.*Tokenize"):
        measure_kept(model, "a text" * 1000)
    model.fn = lambda model, text: model.f(torch.full((2, WIDTH), float(len(text)), device=device)).exp()
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
    assert "the first step keeps " in str(report)


# The count of the first step: copies of a model share what waits to count.


def replica_of(model):
    """As ``nn.parallel.replicate`` makes one for each device, at each step."""
    replica = model._replicate_for_data_parallel()
    replica._modules = dict(model._modules)
    for name, parameter in model._parameters.items():
        setattr(replica, name, parameter)
    return replica


def test_data_parallel_counts_the_first_replica_of_the_first_step(device):
    model = Attack(lambda model, x: model.f(x).exp().sin(), p=nn.Parameter(torch.ones(WIDTH))).to(device)
    x = random(2, 16, WIDTH, device=device)
    report = patch(model)
    model(x).sum().backward()
    expected = report.step.nbytes_kept, report.step.nbytes_avoided
    unpatch(model)
    report, found = patch(model), []
    for _ in range(3):
        for replica in [replica_of(model) for _ in range(2)]:
            replica(x[: 2 - len(found) % 2]).sum().backward()  # the last one has fewer rows
            found.append((report.step.nbytes_kept, report.step.nbytes_avoided))
    assert found == 6 * [expected] and expected[0] > 0


def test_a_forward_in_eval_mode_counts_until_there_is_a_training_step():
    model = build("bert", dropout=0.1).eval()
    report, batch, counted = patch(model), batch_for(model), []
    for is_training in (False, False, True, False, True):
        model.train(is_training)(**batch).loss.backward()
        counted.append((report.step.nbytes_kept, report.step.nbytes_avoided))
    in_eval, training = counted[0], counted[2]
    assert counted == [in_eval, in_eval, training, training, training] and in_eval[1] < training[1]
