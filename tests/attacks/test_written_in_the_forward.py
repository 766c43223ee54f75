"""Attacks by writes inside the forward: to buffers, to what a checkpointed block has touched, through ``.data =``."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hf_memsave import KeptTensorChangedError, patch
from support.attacks import WIDTH, Block, assert_trains_like_stock, kept_of
from support.helpers import EARLIER, autocasting, nbytes, nodes, random


def copied():
    return saved_tensors_hooks(torch.clone, lambda kept: kept)


def test_a_queue_of_keys(device):
    """As MoCo keeps one: used, and then filled."""

    def fn(model, x):
        query = F.normalize(model.f(x.mean(1)), dim=-1)
        out = query @ model.queue.clone().detach()
        with torch.no_grad():
            model.queue[:, :2] = query.T
        return out

    assert_trains_like_stock(fn, random(2, 16, WIDTH, device=device), queue=random(WIDTH, 64))


def test_a_codebook_that_decays(device):
    def fn(model, x):
        out = model.f(x) @ F.normalize(model.codes, dim=-1).T
        with torch.no_grad():
            model.codes.mul_(0.99)
        return out

    assert_trains_like_stock(fn, random(2, 16, WIDTH, device=device), codes=random(8, WIDTH))


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_what_a_checkpointed_block_touched_by_a_closure(is_checkpointed, device):
    def fn(model, x):
        position = model.f(x).detach()
        out = model.o(torch.cat([position, position * 2, position * 3], -1))
        x = model.g(x)
        x = checkpoint(lambda x: model.block(x, position), x, use_reentrant=False) if is_checkpointed else x
        position.add_(0)
        return x + out

    block = Block(lambda block, x, p: x + torch.tanh(block.f(x + p)))
    assert_trains_like_stock(fn, random(2, 16, WIDTH, device=device), block=block)


def test_data_that_is_assigned(device):
    def fn(model, x):
        a = model.f(x).detach()
        out = model.o(torch.cat([a, a * 3, a * 2], -1))
        a.data = torch.zeros_like(a)
        return out

    assert_trains_like_stock(fn, random(2, 16, WIDTH, device=device))


@pytest.mark.parametrize("context", [torch.enable_grad, copied], ids=["no hook", "hook"])
def test_data_taken_after_a_write(context, device):
    """Its version starts again: it must not be taken for what was kept before the write."""

    def fn(model, x):
        a = model.f(x)
        first = model.g(a)
        a.detach().add_(1)
        return first.detach() + model.h(a.data)

    assert_trains_like_stock(fn, random(2, 16, WIDTH, device=device), context)


@pytest.mark.parametrize("context", [copied, torch.enable_grad], ids=["hook", "no hook"])
def test_a_thin_product_under_a_hook_and_autocast(context, device):
    def fn(model, x):
        x = model.f(x)
        with context():
            x = model.wide(model.thin(x)).sin()
        return model.h(x[..., :WIDTH])

    parts = dict(thin=torch.nn.Linear(WIDTH, 4), wide=torch.nn.Linear(4, 2 * WIDTH))
    low = functools.partial(autocasting, device, torch.bfloat16)
    assert_trains_like_stock(fn, random(2, 16, WIDTH, device=device), low, **parts)


class Scribbles(torch.autograd.Function):
    """Its backward writes to what it kept."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.cos_()


@pytest.mark.parametrize("is_first", [False, True])
def test_a_backward_writes_to_what_a_hook_keeps_for_others_too(is_first, device):
    """Stock has a copy for each of them; ours one for all: it is right, or says so."""

    def fn(model, x):
        x = model.f(x)
        parts = [lambda: Scribbles.apply(x), lambda: x.sin()]
        first, second = (part() for part in (parts if is_first else parts[::-1]))
        return model.g(first * 2 + second)

    try:
        assert_trains_like_stock(fn, random(2, 16, WIDTH, device=device), copied)
    except KeptTensorChangedError as error:
        assert "written to by the backward" in str(error)


def test_what_cannot_be_remade_after_a_write_does_not_count_as_let_go_of(device):
    def fn(model, x):
        a = model.f(x)
        out = model.g(a * 2).sum()
        a.mul_(3)
        return out + model.h(a.double().float()).sum()

    mine, stock = kept_of(fn, random(8, 64, WIDTH, device=device))
    assert mine <= stock


def test_a_row_of_a_table_is_kept_and_not_the_table(device):
    def fn(model, x):
        rows = model.table[torch.arange(16, device=x.device)]
        return model.g(rows * x.mean(0))

    table = torch.nn.Parameter(random(5000, WIDTH), requires_grad=False)
    mine, stock = kept_of(fn, random(2, 16, WIDTH, device=device), table=table)
    assert mine <= stock < nbytes(table)


def test_a_source_that_later_depends_on_what_is_remade_from_it(device):
    """What held it held then, by its graph, itself: for ever."""
    EARLIER.update(nodes())
    model = nn.Sequential(Repeats(), nn.Linear(64, 1)).to(device)
    patch(model)
    source = torch.randn(8, 4, device=device)
    y = model(source)
    source.add_(y)
    del y, source
    assert not nodes()


class Repeats(nn.Module):
    """Makes much of little."""

    def forward(self, x):
        return x.repeat(1, 16)
