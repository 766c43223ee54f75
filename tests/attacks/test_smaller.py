"""Attacks on ops that are swapped in, by parametrized weights and undefined gradients."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import register_parametrization
from transformers.activations import NewGELUActivation, QuickGELUActivation

from hf_memsave import WTACRS, MemSaveConfig, patch
from hf_memsave.ops.approximate.sign_bit import SignBit
from hf_memsave.patching.sampled_layers import sampler_of
from support.attacks import WIDTH, Attack, flat, pair, trained
from support.helpers import GoesBack, random
from support.steps import assert_same, patched, step
from support.zoo import Size, batch_for, build

SIZE = Size(hidden=32, heads=4, layers=2, batch=3, seq=16)
SAMPLED = MemSaveConfig(linear=WTACRS(minimum=4))


def of_linears():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("config", [True, "tempo", "wta-crs", "few-bit"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_parametrized_weight_is_read_once(config, when, device):
    """Loss and buffers tell how often it was read; its gradient is exact, since it is not sampled."""
    ours, stock = pair(lambda model, x: model.layers(x), device, None, layers=of_linears())
    x = random(4, 64, WIDTH, device=device)
    if when == "after":
        patch(ours.layers, config)
    for model in (stock, ours):
        for number in (0, 3):
            torch.manual_seed(1)
            spectral_norm(model.layers[number])
    if when == "before":
        patch(ours.layers, config)
    found = [flat(trained(model, x)) for model in (ours, stock)]
    assert any("spectral" in name or "_u" in name for name in found[0])
    if config not in (True, "wta-crs"):
        found = [{name: t for name, t in one.items() if not name.endswith("grad")} for one in found]
    assert_same(*found)


class Noisy(nn.Module):
    """Another weight at each read."""

    def forward(self, weight):
        return weight + 0.1 * torch.rand_like(weight)


@pytest.mark.parametrize("config", [True, "tempo", "wta-crs"])
def test_a_norm_whose_weight_is_drawn(config, device):
    for bias in (0.0, 10.0):  # the second leaves it to stock
        layers = of_linears()
        nn.init.constant_(layers[2].bias, bias)
        found = []
        for model in pair(lambda model, x: model.layers(x), device, config, layers=layers):
            register_parametrization(model.layers[2], "weight", Noisy())
            loss = step(model, random(4, 64, WIDTH, device=device))["loss"]
            found.append({"loss": loss, "rest": torch.rand(3)})
        assert_same(*found)


def undefined(x):
    """In backward x has no gradient, though it wants one."""
    return GoesBack.apply(x, lambda dy: None)


AFTER = {
    "activation": lambda model, x: model.layer(x),
    "activation and linear": lambda model, x: model.g(model.layer(x)),
    "dropout": lambda model, x: F.dropout(x, 0.3),
    "norm": lambda model, x: model.norm(x),
    "linear": lambda model, x: model.g(x),
    "rectifier": lambda model, x: model.g(x.relu()),
    "attention": lambda model, x: F.scaled_dot_product_attention(model.f(x), model.g(x), model.h(x)),
    "pool": lambda model, x: F.max_pool1d(model.g(x), 2),
    "convolution": lambda model, x: F.conv1d(x, model.g.weight[:, :16, None], None),
}
FIELDS = {"activation": "invert", "norm": "output"}, {"activation": "precision_bit"}, {"storage": "int8"}
CONFIGS = (True, "few-bit", SAMPLED, *FIELDS)


@pytest.mark.parametrize("after", AFTER)
def test_an_undefined_gradient_stays_undefined(after, device):
    """A gradient of zeros instead would let AdamW decay the weight."""

    def fn(model, x):
        first = model.o(torch.cat([x, x, x], -1))
        return first.sum() + undefined(AFTER[after](model, model.f(x))).sum()

    activations = (nn.GELU, NewGELUActivation, QuickGELUActivation)[: 3 if "activation" in after else 1]
    for activation, config in product(activations, CONFIGS):
        for model in pair(fn, device, config, layer=activation(), norm=nn.LayerNorm(WIDTH)):
            model(random(4, 16, WIDTH, device=device)).backward()
            trained = {name for name, p in model.named_parameters() if p.grad is not None}
            assert trained == {"o.weight", "o.bias"}, config


def test_an_undefined_gradient_of_sampled_attention_and_of_a_fused_pair(device):
    model = build("llama", SIZE)
    model.set_attn_implementation("eager")
    patch(model.to(device), MemSaveConfig(linear=WTACRS(minimum=4, targets=("0", "1"), attention=True)))
    last = model.model.layers[-1].self_attn
    last.register_forward_hook(lambda module, args, output: (undefined(output[0]), *output[1:]))
    step(model, batch_for(model, SIZE))
    assert {n for n, p in last.named_parameters() if p.grad is not None} == set()
    layer, before = SignBit(nn.GELU(), nn.Linear(WIDTH, 4)).to(device), nn.Linear(WIDTH, WIDTH).to(device)
    (undefined(layer(before(random(8, WIDTH, device=device)))).sum() + before.bias.sum()).backward()
    assert [p.grad for p in (*layer.parameters(), before.weight)] == [None] * 3


@pytest.mark.parametrize("is_sampled", [True, False])
def test_an_undefined_gradient_of_one_of_two_that_share_a_draw(is_sampled, device):
    """The others tell the cache their norms, of this step and of the next."""

    def fn(model, x):
        x = model.h(x)
        return model.f(x).sum() + (undefined(model.g(x)) if is_sampled else model.g(x) * 0).sum()

    torch.manual_seed(0)
    model = patched(Attack(fn).to(device), SAMPLED)
    cache, told = sampler_of(model).cache, []
    update = cache.update
    cache.update = lambda layer, *rest: (told.append((layer, rest[-1].clone())), update(layer, *rest))
    for _ in range(2):
        model(random(4, 64, WIDTH, device=device)).backward()
        model.zero_grad()
    assert [layer for layer, _ in told].count("f") == 2
    assert all(norms.gt(0).all() for layer, norms in told if layer == "f")
