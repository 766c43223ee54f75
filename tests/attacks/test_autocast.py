"""Attacks on conversions under autocast: who shares them, for how long, and who still needs one that was emptied."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hf_memsave import patch
from support.attacks import WIDTH, Block, assert_trains_like_stock
from support.helpers import autocasting, random

SHAPE = (2, 16, WIDTH)


def under_autocast(device):
    return functools.partial(autocasting, device, torch.bfloat16)


@pytest.fixture
def assert_same_under_autocast(device):
    def check(fn, x=None, context=None, **parts):
        x = random(*SHAPE, device=device) if x is None else x
        assert_trains_like_stock(fn, x, context=context or under_autocast(device), **parts)

    return check


@pytest.mark.parametrize("product", [torch.mm, torch.matmul])
def test_a_product_that_writes_to_out(product, assert_same_under_autocast):
    def fn(model, x):
        out = torch.zeros(WIDTH, WIDTH, device=x.device)
        product(model.w, model.w, out=out)
        return model.f(x) @ out

    assert_same_under_autocast(fn, w=random(WIDTH, WIDTH))


def test_what_a_product_writes_to_was_read_before(assert_same_under_autocast):
    def fn(model, x):
        out = model.w * 2
        added = torch.sin(model.f(x)[0] + out[:16])
        torch.mm(model.w, model.w, out=out)
        return model.g(added) + out[:16]

    assert_same_under_autocast(fn, w=random(WIDTH, WIDTH))


# Until when a conversion is shared


def test_autocast_is_entered_again_within_the_forward(device, assert_same_under_autocast):
    def fn(model, x):
        for _ in range(3):
            with torch.autocast(device.type, torch.bfloat16):
                x = torch.tanh(model.f(x)).float()
        return x

    assert_same_under_autocast(fn, context=contextlib.nullcontext)


def test_autocast_is_switched_off_in_between(device, assert_same_under_autocast):
    def fn(model, x):
        for _ in range(3):
            x = torch.tanh(model.f(x))
            with torch.autocast(device.type, enabled=False):
                x = model.g(x.float())
        return x

    assert_same_under_autocast(fn)


def test_the_cache_is_cleared_within_the_forward(assert_same_under_autocast):
    def fn(model, x):
        for _ in range(3):
            torch.clear_autocast_cache()
            x = torch.tanh(model.f(x)).float()
        return x

    assert_same_under_autocast(fn)


def test_a_weight_of_a_linear_and_of_a_product_of_a_list(assert_same_under_autocast):
    def fn(model, x):
        return torch.linalg.multi_dot([x[0], model.f.weight, model.f.weight]).float() + model.f(x)

    assert_same_under_autocast(fn)


def test_vectors_in_a_product_of_a_list(assert_same_under_autocast):
    def fn(model, x):
        return torch.linalg.multi_dot([model.f.bias, model.f.weight, model.g.bias]) * model.f(x)

    assert_same_under_autocast(fn)


def test_a_write_before_autocast_ends_leaves_what_it_shares(assert_same_under_autocast):
    def fn(model, x):
        h = model.f(x)
        y = model.g(torch.sin(h.float() * 2))
        h.mul_(0.5)  # what sin keeps is made of it, and now
        return model.f(h) + y

    def without_a_context():
        stack = contextlib.ExitStack()
        torch.set_autocast_enabled("cpu", True)
        stack.callback(torch.set_autocast_enabled, "cpu", False)
        stack.callback(torch.clear_autocast_cache)
        return stack

    assert_same_under_autocast(fn, x=random(*SHAPE), context=without_a_context)


# Who needs one that was emptied


def test_a_thin_product_is_handed_to_the_next_block(assert_same_under_autocast):
    class Thin(nn.Module):
        def __init__(self):
            super().__init__()
            first = Block(lambda block, x: F.linear(x, block.w, block.b))
            first.w, first.b = nn.Parameter(random(16 * WIDTH, WIDTH)), nn.Parameter(random(16 * WIDTH))
            second = Block(lambda block, x: x + torch.tanh(block.o(torch.sin(x))))
            second.o = nn.Linear(16 * WIDTH, 16 * WIDTH)
            self.blocks = nn.Sequential(first, second)

    assert_same_under_autocast(lambda model, x: model.thin.blocks(x), thin=Thin())


@pytest.mark.parametrize("saved", ["_to_copy", "addmm", "mm"])
def test_selective_checkpointing_holds_what_is_shared(saved, assert_same_under_autocast):
    op = getattr(torch.ops.aten, saved).default
    contexts = functools.partial(create_selective_checkpoint_contexts, [op])

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            return x + self.down(F.gelu(self.up(x)))

    def fn(model, x):
        x = model.f(x)
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        return x

    layers = nn.ModuleList()
    for _ in range(2):
        layers.append(Block(lambda block, x: block.wide(x)))
        layers[-1].wide = Wide()
    assert_same_under_autocast(fn, layers=layers)


def test_blocks_share_a_weight_that_is_emptied_between_them(assert_same_under_autocast):
    first, second = (Block(lambda block, x: x + torch.tanh(block.f(torch.sin(x)))) for _ in range(2))
    second.f = first.f
    assert_same_under_autocast(lambda model, x: model.blocks(model.f(x)), blocks=nn.Sequential(first, second, first))


class WithItself(nn.Module):
    """Hands on what it multiplies, too."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        h = x.transpose(1, 2)
        return h, h @ h, F.scaled_dot_product_attention(h, h, h)


@pytest.mark.parametrize("which", [1, 2], ids=["matmul", "sdpa"])
def test_a_product_of_a_tensor_with_itself_which_others_read_too(which, device):
    """Three gradients meet, and their sum depends on the order in which the conversions were made."""
    model, results = WithItself().to(device), []
    for _ in range(2):
        found = []
        for seed in range(20):
            x = random(2, 8, 8, device=device, seed=seed).requires_grad_()
            with autocasting(device, torch.bfloat16):
                out = model(x)
            seeds = [random(*t.shape, device=device, seed=100 + seed).to(t.dtype) for t in (out[0], out[which], x)]
            found.append(torch.autograd.grad([out[0], out[which], x], x, seeds)[0])
        results.append(found)
        patch(model)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
