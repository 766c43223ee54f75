"""Attacks by what refuses hooks, or hides storages: ``torch.func`` and forward-mode AD within the forward."""

import copy
import functools
import random as random_module
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks
from transformers import DynamicCache

from hf_memsave import measure_kept, patch
from hf_memsave.errors import PatchError
from support.attacks import WIDTH, Attack, Block, assert_trains_like_stock, trained
from support.helpers import autocasting, random
from support.steps import assert_same

SHAPE = (2, 16, WIDTH)


def with_hooks_disabled(model, x):
    with disable_saved_tensors_hooks("not here"):
        return model.g(x).sin()


REFUSES: dict[str, Callable] = {
    "grad": lambda model, x: torch.func.grad(lambda t: model.g(t).tanh().sum())(x),
    "per-sample grad": lambda model, x: torch.vmap(torch.func.grad(lambda t: model.g(t).tanh().sum()))(x),
    "jacrev": lambda model, x: torch.func.jacrev(lambda t: model.g(t).sin().sum(0))(x[0]),
    "hooks disabled": with_hooks_disabled,
}
TAKES: dict[str, Callable] = {
    "vmap": lambda model, x: torch.vmap(lambda t: torch.tanh(model.f(t)) * 2)(x),
    "attention in vmap": lambda model, x: torch.vmap(lambda t: F.scaled_dot_product_attention(t, t, t))(x[:, None]),
    "jvp": lambda model, x: torch.func.jvp(lambda t: torch.tanh(model.f(t)) * 2, (x,), (torch.ones_like(x),))[1],
    "convolution in vmap": lambda model, x: torch.vmap(F.conv1d)(x.transpose(1, 2)[:, None].float(), model.frozen),
    "dropout in vmap": lambda model, x: torch.vmap(lambda t: F.dropout(t, 0.5) * 2, randomness="different")(x),
}  # fmt: skip


def dual(model, x):
    with forward_ad.dual_level():
        made = forward_ad.make_dual(x, torch.ones_like(x))
        primal, tangent = forward_ad.unpack_dual(torch.tanh(model.f(made)))
        return primal.float() * tangent.float()


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "autocast"])
@pytest.mark.parametrize("how", [*REFUSES, *TAKES, "dual"])
def test_a_transform_within_the_forward(how, autocast, device):
    transform = {**REFUSES, **TAKES, "dual": dual}[how]

    def fn(model, x):
        x = model.f(x)
        return model.h(transform(model, x).sum() + model.g(x).exp())

    frozen = nn.Parameter(random(2, 3, WIDTH, 1), requires_grad=False)
    context = functools.partial(autocasting, device, autocast)
    assert_trains_like_stock(fn, random(*SHAPE, device=device), context, frozen=frozen)


# A forward that starts again


def test_what_was_drawn_before_is_drawn_again(device):
    def fn(model, x):
        noise = random_module.random() + np.random.rand() + torch.rand((), device=x.device)
        x = F.dropout(model.f(x), 0.5) * noise
        return x + REFUSES["grad"](model, x)

    stock = Attack(fn).to(device)
    ours, x = copy.deepcopy(stock), random(*SHAPE, device=device)
    patch(ours)
    results = []
    for model in (ours, stock):
        random_module.seed(0)
        np.random.seed(0)
        results.append(trained(model, x))
    for got, expected in zip(*results, strict=True):
        assert_same(got, expected)


def test_repeated_blocks_keep_their_tapes(device):
    def deep(block, x):
        return x + block.f(torch.sin(torch.sigmoid(torch.exp(torch.sin(x)))))

    def fn(model, x):
        return model.blocks(model.f(x)) + REFUSES["grad"](model, x)

    stock = Attack(fn, blocks=nn.Sequential(*[Block(deep) for _ in range(3)])).to(device)
    ours, x = copy.deepcopy(stock), random(*SHAPE, device=device)
    report = patch(ours)
    for got, expected in zip(trained(ours, x), trained(stock, x), strict=True):
        assert_same(got, expected)
    assert measure_kept(ours, x).total < 0.8 * measure_kept(stock, x).total
    assert report.step.nbytes_avoided > 0


def test_a_block_that_refuses_hooks_steps_aside_alone(device):
    refusing = Block(lambda block, x: x + torch.func.grad(lambda t: block.f(t).tanh().sum())(x))
    deep = Block(lambda block, x: x + block.f(torch.sin(torch.sigmoid(torch.exp(torch.sin(x))))))
    stock = Attack(lambda model, x: model.blocks(model.f(x)), blocks=nn.Sequential(deep, refusing)).to(device)
    ours, x = copy.deepcopy(stock), random(*SHAPE, device=device)
    patch(ours)
    for got, expected in zip(trained(ours, x), trained(stock, x), strict=True):
        assert_same(got, expected)
    assert measure_kept(ours, x).total < measure_kept(stock, x).total


def writes_to_a_buffer(model, x):
    model.count.add_(1)
    return model.f(x) + REFUSES["grad"](model, x)


def replaces_a_buffer(model, x):
    model.count = model.count + 1
    return model.f(x) + REFUSES["grad"](model, x)


@pytest.mark.parametrize("fn", [writes_to_a_buffer, replaces_a_buffer])
def test_a_forward_that_has_changed_the_model_does_not_start_again(fn, device):
    model = Attack(fn, count=torch.zeros(())).to(device)
    patch(model)
    with pytest.raises(PatchError, match="refuses saved-tensor hooks"):
        model(random(*SHAPE, device=device))
    assert model.count == 1


def test_a_forward_that_was_given_a_cache_does_not_start_again(device):
    class Caches(Attack):
        def forward(self, x, cache):
            return self.f(x) + REFUSES["grad"](self, x)

    model = Caches(None).to(device)
    patch(model)
    with pytest.raises(PatchError, match="given more than tensors"):
        model(random(*SHAPE, device=device), DynamicCache())


def test_a_forward_that_refuses_hooks_later_says_what_to_do(device):
    def fn(model, x):
        return model.f(x) if model.takes_hooks else REFUSES["grad"](model, x)

    model, x = Attack(fn, takes_hooks=True).to(device), random(*SHAPE, device=device)
    patch(model)
    model(x)
    model.takes_hooks = False
    with pytest.raises(PatchError, match=r"unpatch\(model\)"):
        model(x)


def test_an_error_of_the_model_is_its_own(device):
    def fn(model, x):
        if model.fails:
            raise RuntimeError("of the model")
        return model.f(x)

    model, x = Attack(fn, fails=True).to(device), random(*SHAPE, device=device)
    report = patch(model)
    with pytest.raises(RuntimeError, match="of the model"):
        model(x)
    model.fails = False
    model(x).sum().backward()
    assert report.step.nbytes_kept > 0
