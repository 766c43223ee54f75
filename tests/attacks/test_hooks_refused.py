"""Attacks by what refuses hooks, or hides storages: ``torch.func`` and forward-mode AD within the forward."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks

from hf_memsave import measure_kept, patch
from hf_memsave.errors import PatchError
from support.attacks import WIDTH, Attack, Block, assert_trains_like_stock, flat, pair, trained
from support.helpers import autocasting, random
from support.steps import assert_same, patched

SHAPE = (2, 16, WIDTH)


def with_hooks_disabled(model, x):
    with disable_saved_tensors_hooks("not here"):
        return model.g(x).sin()


def dual(model, x):
    with forward_ad.dual_level():
        made = forward_ad.make_dual(x, torch.ones_like(x))
        primal, tangent = forward_ad.unpack_dual(torch.tanh(model.f(made)))
        return primal.float() * tangent.float()


def dropped(randomness, *options, dropout=F.dropout):
    return lambda model, x: torch.vmap(lambda t: dropout(t, 0.5, *options) * 2, randomness=randomness)(x)


REFUSES = {
    "grad": lambda model, x: torch.func.grad(lambda t: model.g(t).tanh().sum())(x),
    "per-sample grad": lambda model, x: torch.vmap(torch.func.grad(lambda t: model.g(t).tanh().sum()))(x),
    "jacrev": lambda model, x: torch.func.jacrev(lambda t: model.g(t).sin().sum(0))(x[0]),
    "hooks disabled": with_hooks_disabled,
}
TAKES = {
    "vmap": lambda model, x: torch.vmap(lambda t: torch.tanh(model.f(t)) * 2)(x),
    "attention in vmap": lambda model, x: torch.vmap(lambda t: F.scaled_dot_product_attention(t, t, t))(x[:, None]),
    "jvp": lambda model, x: torch.func.jvp(lambda t: torch.tanh(model.f(t)) * 2, (x,), (torch.ones_like(x),))[1],
    "convolution in vmap": lambda model, x: torch.vmap(F.conv1d)(x.transpose(1, 2)[:, None].float(), model.frozen),
    "dropout in vmap": dropped("different"),
    "the same dropout in vmap": dropped("same"),
    "alpha dropout in vmap": dropped("different", True, dropout=F.alpha_dropout),
    "dual": dual,
}


@pytest.mark.parametrize("how", TAKES)
def test_a_transform_within_the_forward(how, device):
    def fn(model, x):
        x = model.f(x)
        return model.h(TAKES[how](model, x).sum() + model.g(x).exp())

    frozen = nn.Parameter(random(2, 3, WIDTH, 1), requires_grad=False)
    for autocast in (None, torch.bfloat16):
        context = functools.partial(autocasting, device, autocast)
        assert_trains_like_stock(fn, random(*SHAPE, device=device), context, steps=1, frozen=frozen)


@pytest.mark.parametrize("how", REFUSES)
def test_a_forward_that_refuses_hooks_says_what_to_do(how, device):
    model = patched(Attack(lambda model, x: model.f(x) + REFUSES[how](model, x).sum()).to(device))
    with pytest.raises(PatchError, match=r"of Attack calls what refuses saved-tensor hooks.*unpatch\(model\)"):
        model(random(*SHAPE, device=device))


def test_the_parts_that_take_hooks_can_be_patched(device):
    deep = Block(lambda block, x: x + block.f(torch.sin(torch.sigmoid(torch.exp(torch.sin(x))))))
    x = random(*SHAPE, device=device)
    ours, stock = pair(lambda model, x: model.block(model.f(x)) + REFUSES["grad"](model, x), device, None, block=deep)
    patch(ours.block)
    assert_same(*(flat(trained(model, x)) for model in (ours, stock)))
    assert measure_kept(ours, x).total < measure_kept(stock, x).total


def test_an_error_of_the_model_is_its_own(device):
    def fn(model, x):
        if model.fails:
            raise RuntimeError("of the model")
        return model.f(model.f(x))

    model, x = Attack(fn, fails=True).to(device), random(*SHAPE, device=device)
    report = patch(model)
    with pytest.raises(RuntimeError, match="of the model"):
        model(x)
    model.fails = False
    model(x).sum().backward()
    assert report.step.is_counted and report.step.nbytes_stock > 0
