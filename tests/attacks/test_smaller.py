"""Smaller attacks on ops that are swapped in: parametrized weights, undefined gradients, dropout in place."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import register_parametrization
from transformers.activations import NewGELUActivation, QuickGELUActivation

from hf_memsave import WTACRS, MemSaveConfig, patch
from hf_memsave.errors import KeptTensorChangedError
from hf_memsave.ops.sign_bit import SignBit
from hf_memsave.patching.sampled_layers import sampler_of
from support.attacks import WIDTH, Attack
from support.families import Size, batch_for, build
from support.helpers import assert_same_bits, random
from support.steps import assert_same, gradients, step

SIZE = Size(hidden=32, heads=4, layers=2, batch=3, seq=16)
SAMPLED = MemSaveConfig(linear=WTACRS(minimum=4))


# Parametrized weights: a power iteration at each read


@pytest.mark.parametrize("config", [True, "tempo", "wta-crs", "few-bit"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_parametrized_weight_is_read_once(config, when, device):
    """Loss and buffers tell how often it was read; its gradient is exact, since it is not sampled."""
    torch.manual_seed(0)
    stock = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    stock = nn.ModuleList([stock]).to(device)
    stock.forward = lambda x: stock[0](x)
    ours = copy.deepcopy(stock)
    ours.forward = lambda x: ours[0](x)
    x = random(4, 64, WIDTH, device=device)
    if when == "after":
        patch(ours[0], config)
    for model in (stock, ours):
        for number in (0, 3):
            torch.manual_seed(1)
            spectral_norm(model[0][number])
    if when == "before":
        patch(ours[0], config)
    for _ in range(2):
        results = []
        for model in (ours, stock):
            model.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            buffers = {name: b.clone() for name, b in model.named_buffers()}
            results.append(
                {"loss": loss.detach(), **buffers, **(gradients(model) if config in (True, "wta-crs") else {})}
            )
        assert_same(*results)


class Noisy(nn.Module):
    """Another weight at each read."""

    def forward(self, weight):
        return weight + 0.1 * torch.rand_like(weight)


@pytest.mark.parametrize("config", [True, "tempo", "wta-crs"])
@pytest.mark.parametrize("bias", [0.0, 10.0], ids=["of a small bias", "of a bias that leaves it to stock"])
def test_a_norm_whose_weight_is_drawn(bias, config, device):
    torch.manual_seed(0)
    stock = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)).to(device)
    nn.init.constant_(stock[1].bias, bias)
    ours = copy.deepcopy(stock)
    patch(ours, config)
    found = []
    for model in (ours, stock):
        register_parametrization(model[1], "weight", Noisy())
        torch.manual_seed(1)
        loss = model(random(4, 64, WIDTH, device=device)).pow(2).mean()
        loss.backward()
        found.append({"loss": loss.detach(), "rest": torch.rand(3)})
    assert_same(*found)


# Gradients that are not there


class Undefined(torch.autograd.Function):
    """Its backward says that the input has no gradient, though it wants one."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return None


def undefined_after(layer):
    return lambda model, x: Undefined.apply(layer(model, model.f(x)))


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
CONFIGS = {
    "exact": MemSaveConfig(),
    "invert": MemSaveConfig(activation="invert", norm="output"),
    "precision_bit": MemSaveConfig(activation="precision_bit"),
    "few_bit": MemSaveConfig(activation="few_bit"),
    "WTA": SAMPLED,
    "int8": MemSaveConfig(storage="int8"),
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("activation", [nn.GELU, NewGELUActivation, QuickGELUActivation], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("after", AFTER)
def test_an_undefined_gradient_stays_undefined(after, activation, config, device):
    """A gradient of zeros instead would let AdamW decay the weight."""
    torch.manual_seed(0)
    parts = {"layer": activation(), "norm": nn.LayerNorm(WIDTH)}

    def fn(model, x):
        first = model.o(torch.cat([x, x, x], -1))
        return first.sum() + undefined_after(AFTER[after])(model, x).sum()

    stock = Attack(fn, **parts).to(device)
    ours = copy.deepcopy(stock)
    patch(ours, CONFIGS[config])
    for model in (ours, stock):
        model(random(4, 16, WIDTH, device=device)).backward()
        assert {name for name, p in model.named_parameters() if p.grad is not None} == {"o.weight", "o.bias"}


def test_an_undefined_gradient_of_sampled_attention(device):
    model = build("llama", SIZE)
    model.set_attn_implementation("eager")
    patch(model.to(device), MemSaveConfig(linear=WTACRS(minimum=4, targets=("0", "1"), attention=True)))
    last = model.model.layers[-1].self_attn
    last.register_forward_hook(lambda module, args, output: (Undefined.apply(output[0]), *output[1:]))
    step(model, batch_for(model, SIZE))
    assert {n for n, p in last.named_parameters() if p.grad is not None} == set()


@pytest.mark.parametrize("is_sampled", [True, False])
def test_an_undefined_gradient_of_one_of_two_that_share_a_draw(is_sampled, device):
    """The others tell the cache their norms, of this step and of the next."""

    def fn(model, x):
        x = model.h(x)
        return model.f(x).sum() + (Undefined.apply(model.g(x)) if is_sampled else model.g(x) * 0).sum()

    torch.manual_seed(0)
    model = Attack(fn).to(device)
    patch(model, SAMPLED)
    told = []
    cache = sampler_of(model).cache
    update = cache.update
    cache.update = lambda layer, *rest: (told.append((layer, rest[-1].clone())), update(layer, *rest))
    for _ in range(2):
        model(random(4, 64, WIDTH, device=device)).backward()
        model.zero_grad()
    assert [layer for layer, _ in told].count("f") == 2
    assert all(norms.gt(0).all() for layer, norms in told if layer == "f")


def test_an_undefined_gradient_of_a_fused_pair(device):
    layer = SignBit(nn.GELU(), nn.Linear(WIDTH, 4)).to(device)
    before = nn.Linear(WIDTH, WIDTH).to(device)
    (Undefined.apply(layer(before(random(8, WIDTH, device=device)))).sum() + before.bias.sum()).backward()
    assert [p.grad for p in (*layer.parameters(), before.weight)] == [None] * 3


# Dropout


@pytest.mark.parametrize("config", [True, {"dropout": "mask"}, {"dropout": "stock"}, "tempo"], ids=str)
@pytest.mark.parametrize("cls", [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_dropout_is_put_in_place_after_patching(cls, config, device):
    def fn(model, x):
        hidden = model.f(x) * 2
        dropped = model.drop(hidden.unflatten(0, (-1, 2)) if cls is nn.Dropout2d else hidden)
        return model.g(dropped.view_as(hidden)) + model.h(hidden)  # where it is in place, of what was dropped

    stock = Attack(fn, drop=cls(0.3)).to(device)
    ours = copy.deepcopy(stock)
    patch(ours, config)
    found = []
    for model in (ours, stock):
        model.drop.inplace = True
        torch.manual_seed(1)
        loss = model(random(4, 16, WIDTH, device=device)).pow(2).mean()
        loss.backward()
        found.append({"loss": loss.detach(), **gradients(model)})
    assert_same(*found)


@pytest.mark.parametrize("name", ["recompute", "few_bit", "invert", "precision_bit"])
def test_dropout_after_an_activation_is_put_in_place(name, device):
    """It writes to the activation's output: who keeps that says so, and the others train on."""

    def fn(model, x):
        return model.g(model.drop(model.layer(model.f(x))))

    found = []
    for inplace in (False, True):
        torch.manual_seed(0)
        model = Attack(fn, drop=nn.Dropout(0.3), layer=nn.GELU()).to(device)
        patch(model, MemSaveConfig(activation=name, few_bits=8))
        model.drop.inplace = inplace
        torch.manual_seed(1)
        loss = model(random(4, 16, WIDTH, device=device)).pow(2).mean()
        if inplace and name in ("invert", "precision_bit"):
            with pytest.raises(KeptTensorChangedError, match="inplace operation"):
                loss.backward()
            return
        loss.backward()
        found.append({"loss": loss.detach(), **gradients(model)})
    assert_same_bits(found[0]["loss"], found[1]["loss"])
    for key, expected in found[0].items():  # what was written to is kept, and is not remade: so bits stand for x
        largest = 0.01 * expected.abs().max() if name == "few_bit" else 0
        assert (found[1][key] - expected).abs().max() <= largest, key
