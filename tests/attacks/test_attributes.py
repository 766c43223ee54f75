"""Attacks by attributes: what a layer was called with counts, not what it says when backward comes."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers.activations import GELUActivation

from hf_memsave import MemSaveConfig, patch
from hf_memsave.ops.sign_bit import SignBit
from support.attacks import WIDTH, Attack
from support.helpers import assert_same_bits, only_on_cpu, random
from support.steps import assert_same, gradients


class Change(NamedTuple):
    """A layer, its attribute, and two values of it."""

    make: Callable[[], nn.Module]
    name: str
    first: Any
    second: Any


CHANGES = {
    "leaky relu": Change(nn.LeakyReLU, "negative_slope", 0.01, 0.5),
    "lower bound": Change(nn.Hardtanh, "min_val", -1.0, -0.1),
    "upper bound": Change(nn.Hardtanh, "max_val", 1.0, 0.2),
    "threshold": Change(lambda: nn.Threshold(0.1, 0.0), "threshold", 0.1, 0.9),
    "value below the threshold": Change(lambda: nn.Threshold(0.1, 0.0), "value", 0.0, 5.0),
    "gelu": Change(nn.GELU, "approximate", "none", "tanh"),
    "silu": Change(nn.SiLU, "inplace", False, True),
    "no silu in place": Change(nn.SiLU, "inplace", True, False),
    "elu": Change(nn.ELU, "alpha", 1.0, 0.2),
    "softplus": Change(nn.Softplus, "beta", 1.0, 3.0),
    "softshrink": Change(nn.Softshrink, "lambd", 0.1, 0.9),
    "layer norm": Change(lambda: nn.LayerNorm(WIDTH), "eps", 1e-5, 1.0),
    "softmax": Change(lambda: nn.Softmax(-1), "dim", -1, 1),
    "dropout": Change(lambda: nn.Dropout(0.2), "p", 0.2, 0.7),
    "no training": Change(lambda: nn.Dropout(0.2), "training", True, False),
    "dropout in place": Change(lambda: nn.Dropout(0.2), "inplace", False, True),
    "alpha dropout": Change(lambda: nn.AlphaDropout(0.2), "p", 0.2, 0.7),
}


def forward(model, x):
    """The layer's input is kept by nobody else, and its output by the product after it."""
    return model.g(model.layer(model.f(x) * 3)).sin()


def pair(change, config, layer=None):
    torch.manual_seed(0)
    stock = Attack(forward, layer=layer or change.make())
    ours = copy.deepcopy(stock)
    patch(ours, config)
    return ours, stock


def changed_before_backward(model, change, x):
    setattr(model.layer, change.name, change.first)
    loss = model(x).pow(2).mean()
    setattr(model.layer, change.name, change.second)
    loss.backward()
    return [loss.detach()]


def a_forward_of_each(model, change, x):
    losses = []
    for value in (change.first, change.second):
        setattr(model.layer, change.name, value)
        losses.append(model(x).pow(2).mean())
    sum(losses).backward()
    return [loss.detach() for loss in losses]


def changed_within_the_forward(model, change, x):
    """One layer called twice."""

    def twice(model, x):
        setattr(model.layer, change.name, change.first)
        first = forward(model, x)
        setattr(model.layer, change.name, change.second)
        return first + forward(model, first)

    model.fn = twice
    loss = model(x).pow(2).mean()
    loss.backward()
    return [loss.detach()]


ATTACKS = (changed_before_backward, a_forward_of_each, changed_within_the_forward)


def trained(model, attack, change, x):
    torch.manual_seed(3)
    losses = attack(model, change, x)
    return {**{f"loss {i}": loss for i, loss in enumerate(losses)}, **gradients(model)}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
@pytest.mark.parametrize("name", CHANGES)
def test_an_attribute_of_a_layer_is_changed(name, attack, device):
    change, x = CHANGES[name], random(2, 16, WIDTH, device=device)
    ours, stock = (trained(model.to(device), attack, change, x) for model in pair(change, True))
    assert_same(ours, stock)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
@pytest.mark.parametrize("name", [name for name, change in CHANGES.items() if change.name != "inplace"])
def test_the_change_would_be_seen(name, attack, device):
    """A layer whose attribute stays has other gradients, or other values."""
    change, x = CHANGES[name], random(2, 16, WIDTH, device=device)
    other = change._replace(second=change.first) if attack is not changed_before_backward else None
    other = other or change._replace(first=change.second)
    found = [trained(pair(change, True)[1].to(device), attack, c, x) for c in (change, other)]
    assert not all(torch.equal(found[0][key], found[1][key]) for key in found[0])


#: Of activations whose gradient is not exact: those whose attributes choose the function.
APPROXIMATE = {name: CHANGES[name] for name in ("gelu", "silu")}
VALUES = ("stock", "invert", "precision_bit", "few_bit")


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", APPROXIMATE)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_an_approximate_activation_is_changed_before_backward(name, value, frozen, device):
    """Its gradient is that of the forward: the same as where nothing was changed."""
    only_on_cpu(device)
    change, x = APPROXIMATE[name], random(2, 16, WIDTH, device=device)
    found = []
    for second in (change.first, change.second):
        ours, _ = pair(change, MemSaveConfig(activation=value))
        ours.g.requires_grad_(not frozen)
        found.append(trained(ours, changed_before_backward, change._replace(second=second), x))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("attack", ATTACKS[1:], ids=lambda attack: attack.__name__)
def test_an_approximate_gelu_is_changed_between_forwards(attack, value, device):
    """Two functions, each of its own slope: near stock's gradients, and the other slope is not."""
    only_on_cpu(device)
    change, x = CHANGES["gelu"], random(2, 16, WIDTH, device=device)
    ours, stock = (trained(model, attack, change, x) for model in pair(change, MemSaveConfig(activation=value)))
    bound = 0.02 if value == "few_bit" else 2e-3
    for key, expected in stock.items():
        assert (ours[key] - expected).abs().max() <= bound * expected.abs().max(), key


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("layer", [nn.SiLU, nn.GELU, GELUActivation], ids=lambda cls: cls.__name__)
def test_an_approximate_activation_becomes_another_function_after_patching(layer, value, device):
    """In place, or Python text: no approximation is claimed of it, and stock's own runs."""
    only_on_cpu(device)
    change = Change(layer, "", None, None)
    ours, stock = pair(change, MemSaveConfig(activation=value))
    found = []
    for model in (ours, stock):
        if layer is nn.SiLU:
            model.layer.inplace = True
        elif layer is GELUActivation:
            model.layer.act = torch.cos
        else:
            model.layer.__dict__["approximate"] = "tanh"
        loss = model(random(2, 16, WIDTH)).pow(2).mean()
        loss.backward()
        found.append({"loss": loss.detach(), **gradients(model)})
    if layer is nn.GELU:
        slack = 0.02 if value == "few_bit" else 2e-3 if value != "stock" else 0
        for key, expected in found[1].items():
            assert (found[0][key] - expected).abs().max() <= slack * expected.abs().max(), key
    else:
        assert_same(*found)


def test_the_gelu_of_a_fused_pair_is_changed(device):
    """``SignBit`` reads which function it is when it is called."""
    x, weight = random(64, WIDTH, device=device), nn.Linear(WIDTH, 4).to(device)
    found = []
    for made, now in (("none", "tanh"), ("tanh", "tanh")):
        layer = SignBit(nn.GELU(made), weight)
        layer.activation.approximate = now
        leaf = (3 * x).requires_grad_()
        out = layer(leaf)
        layer.activation.approximate = made
        found.append((out.detach(), torch.autograd.grad(out.sum(), leaf)[0]))
    for mine, right in zip(*found, strict=True):
        assert_same_bits(mine, right)
