"""Transforms of PyTorch, over a whole patched model: ``compile``, ``torch.func`` and ``functional_call``."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.func import functional_call

from hf_memsave import patch
from support.families import batch_for, build
from support.helpers import only_on_cpu
from support.modes import SMALL, batch_of, make
from support.steps import assert_same, step


def test_compile_takes_the_patched_model_whole(device):
    only_on_cpu(device)
    model = build("llama", replace(SMALL, layers=1))
    found = []
    for change in (lambda model: model, patch):
        change(model)
        torch._dynamo.reset()
        try:
            found.append(step(torch.compile(model, backend="aot_eager", fullgraph=True), batch_of(model)))
        finally:
            torch._dynamo.reset()
    assert_same(*reversed(found))


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_functional_grad_sees_the_patched_model(family, device):
    only_on_cpu(device)
    stock = make(family).eval()
    ours = copy.deepcopy(stock)
    patch(ours)

    def loss(parameters, model):
        return functional_call(model, parameters, kwargs=batch_for(model, SMALL)).loss

    results = [torch.func.grad(loss)(dict(m.named_parameters()), m) for m in (ours, stock)]
    assert_same(*results)


def test_functional_call_with_other_parameters_trains_those(device):
    stock = make("llama", device)
    ours = copy.deepcopy(stock)
    patch(ours)
    results = []
    for model in (ours, stock):
        scale = torch.ones((), device=device, requires_grad=True)
        torch.manual_seed(7)
        doubled = {name: p.detach() * 2 * scale for name, p in model.named_parameters()}
        loss = functional_call(model, doubled, kwargs=batch_of(model)).loss
        loss.backward()
        results.append({"loss": loss.detach(), "scale": scale.grad})
    assert_same(*results)


def test_per_sample_gradients_of_a_patched_layer(device):
    stock = make("bert", device).eval()
    ours = copy.deepcopy(stock)
    patch(ours)
    x = torch.randn(3, 5, SMALL.hidden, device=device)

    def loss(parameters, x, layer):
        return functional_call(layer, parameters, (x,)).square().sum()

    results = []
    for model in (ours, stock):
        layer = model.bert.encoder.layer[0].intermediate
        results.append(
            torch.func.vmap(torch.func.grad(loss), (None, 0, None))(dict(layer.named_parameters()), x, layer)
        )
    assert_same(*results)
