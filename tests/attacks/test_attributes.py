"""Attacks by attributes: what a layer was called with counts, not what it says when backward comes."""

from collections import namedtuple

import pytest
import torch
from torch import nn
from transformers.activations import GELUActivation

from hf_memsave import MemSaveConfig
from hf_memsave.ops.approximate.sign_bit import SignBit
from support.attacks import WIDTH, pair
from support.helpers import assert_same_bits, only_on_cpu, random
from support.steps import assert_same, backward

SHAPE = (2, 16, WIDTH)
#: A layer, its attribute, and two values of it.
Change = namedtuple("Change", "make name first second")


CHANGES = {
    "leaky relu": Change(nn.LeakyReLU, "negative_slope", 0.01, 0.5), "bound": Change(nn.Hardtanh, "max_val", 1.0, 0.2),
    "threshold": Change(lambda: nn.Threshold(0.1, 0.0), "threshold", 0.1, 0.9),
    "gelu": Change(nn.GELU, "approximate", "none", "tanh"), "silu": Change(nn.SiLU, "inplace", False, True),
    "no silu in place": Change(nn.SiLU, "inplace", True, False), "softplus": Change(nn.Softplus, "beta", 1.0, 3.0),
    "layer norm": Change(lambda: nn.LayerNorm(WIDTH), "eps", 1e-5, 1.0),
    "softmax": Change(lambda: nn.Softmax(-1), "dim", -1, 1), "dropout": Change(lambda: nn.Dropout(0.2), "p", 0.2, 0.7),
    "no training": Change(lambda: nn.Dropout(0.2), "training", True, False),
    "alpha dropout": Change(lambda: nn.AlphaDropout(0.2), "p", 0.2, 0.7),
}  # fmt: skip


def forward(model, x):
    """The layer's input is kept by no other, and its output by the product after it."""
    return model.g(model.layer(model.f(x) * 3)).sin()


def changed_before_backward(model, change, x):
    setattr(model.layer, change.name, change.first)
    loss = model(x).pow(2).mean()
    setattr(model.layer, change.name, change.second)
    return loss


def a_forward_of_each(model, change, x):
    losses = []
    for value in (change.first, change.second):
        setattr(model.layer, change.name, value)
        losses.append(model(x).pow(2).mean())
    return sum(losses)


def changed_within_the_forward(model, change, x):
    """One layer called twice."""
    once = model.fn

    def twice(model, x):
        setattr(model.layer, change.name, change.first)
        first = once(model, x)
        setattr(model.layer, change.name, change.second)
        return first + once(model, first)

    model.fn = twice
    return model(x).pow(2).mean()


ATTACKS = (changed_before_backward, a_forward_of_each, changed_within_the_forward)


def trained(model, x, attack=lambda model, _, x: model(x).pow(2).mean(), change=None):
    torch.manual_seed(3)
    return backward(model, attack(model, change, x))


@pytest.mark.parametrize("name", CHANGES)
def test_an_attribute_of_a_layer_is_changed(name, device):
    change, x = CHANGES[name], random(*SHAPE, device=device)
    for attack in ATTACKS:
        ours, stock = (trained(m, x, attack, change) for m in pair(forward, device, layer=change.make()))
        assert_same(ours, stock)
        if change.name != "inplace":  # a layer whose attribute stays has other gradients, or other values
            is_first = attack is changed_before_backward
            other = change._replace(first=change.second) if is_first else change._replace(second=change.first)
            unchanged = trained(pair(forward, device, layer=change.make())[1], x, attack, other)
            assert not all(torch.equal(unchanged[key], stock[key]) for key in stock), "no change would be seen"


@pytest.mark.parametrize("config", [True, {"dropout": "mask"}, {"dropout": "stock"}, "tempo"], ids=str)
def test_dropout_is_put_in_place_after_patching(config, device):
    def reads_what_was_dropped(model, x):
        hidden = model.f(x) * 2
        dropped = model.layer(hidden.unflatten(0, (-1, 2)) if isinstance(model.layer, nn.Dropout2d) else hidden)
        return model.g(dropped.view_as(hidden)) + model.h(hidden)  # where it is in place, of what was dropped

    for kind in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout):
        models = pair(reads_what_was_dropped, device, config, layer=kind(0.3))
        for model in models:
            model.layer.inplace = True
        assert_same(*(trained(model, random(4, 16, WIDTH, device=device)) for model in models))


VALUES = {"stock": 0, "invert": 2e-3, "precision_bit": 2e-3, "few_bit": 0.02}


def assert_near(ours, stock, bound):
    for key, expected in stock.items():
        assert (ours[key] - expected).abs().max() <= bound * expected.abs().max(), key


@pytest.mark.parametrize("value", VALUES)
def test_an_approximate_activation_is_changed(value, device):
    """Before backward, its gradient is that of the forward; between forwards, each has its own function's slope.

    Where it becomes another function, in place or in Python text, no approximation is claimed of it: stock's own runs.
    """
    only_on_cpu(device)
    x, config = random(*SHAPE, device=device), MemSaveConfig(activation=value)
    for name, is_frozen in (("gelu", False), ("gelu", True), ("silu", False), ("silu", True)):
        change, found = CHANGES[name], []
        for second in (change.first, change.second):
            ours, _ = pair(forward, device, config, layer=change.make())
            ours.g.requires_grad_(not is_frozen)
            found.append(trained(ours, x, changed_before_backward, change._replace(second=second)))
        assert_same(found[1], found[0])
    for attack in ATTACKS[1:]:
        models = pair(forward, device, config, layer=nn.GELU())
        assert_near(*(trained(m, x, attack, CHANGES["gelu"]) for m in models), VALUES[value] or 2e-3)
    others = (nn.SiLU, "inplace", True), (GELUActivation, "act", torch.cos), (nn.GELU, "approximate", "tanh")
    for layer, attribute, other in others:
        models = pair(forward, device, config, layer=layer())
        for model in models:
            model.layer.__dict__[attribute] = other
        ours, stock = (trained(model, x) for model in models)
        assert_near(ours, stock, VALUES[value]) if layer is nn.GELU else assert_same(ours, stock)


def test_the_gelu_of_a_fused_pair_is_changed(device):
    """``SignBit`` reads which function it is when it is called."""
    x, weight, found = random(64, WIDTH, device=device), nn.Linear(WIDTH, 4).to(device), []
    for made, now in (("none", "tanh"), ("tanh", "tanh")):
        layer = SignBit(nn.GELU(made), weight)
        layer.activation.approximate = now
        leaf = (3 * x).requires_grad_()
        out = layer(leaf)
        layer.activation.approximate = made
        found.append((out.detach(), torch.autograd.grad(out.sum(), leaf)[0]))
    for mine, right in zip(*found, strict=True):
        assert_same_bits(mine, right)
