"""Attacks on conversions under autocast: who shares them, for how long, and who still needs one that was emptied."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from support.attacks import WIDTH, Attack, Block, assert_alike, assert_trains_like_stock
from support.helpers import autocasting, random

SHAPE = (2, 16, WIDTH)
BF16 = torch.bfloat16


def product_to_out(model, x):
    for product in (torch.mm, torch.matmul):
        out = torch.zeros(WIDTH, WIDTH, device=x.device)
        product(model.w, model.w, out=out)
        x = model.f(x).float() @ out
    return x


def read_before_a_product_writes_to_it(model, x):
    out = model.w * 2
    added = torch.sin(model.f(x)[0] + out[:16])
    torch.mm(model.w, model.w, out=out)
    return model.g(added) + out[:16]


def switched_off_in_between(model, x):
    for _ in range(3):
        x = torch.tanh(model.f(x))
        with torch.autocast(x.device.type, enabled=False):
            x = model.g(x.float())
    return x


def cache_cleared_within(model, x):
    for _ in range(3):
        torch.clear_autocast_cache()
        x = torch.tanh(model.f(x)).float()
    return x


def weights_in_a_product_of_a_list(model, x):
    vectors = torch.linalg.multi_dot([model.f.bias, model.f.weight, model.g.bias])
    return torch.linalg.multi_dot([x[0], model.f.weight, model.f.weight]).float() + vectors * model.f(x)


def entered_again(model, x):
    for _ in range(3):
        with torch.autocast(x.device.type, BF16):
            x = torch.tanh(model.f(x)).float()
    return x


PROGRAMS = (
    product_to_out, read_before_a_product_writes_to_it, switched_off_in_between, cache_cleared_within,
    weights_in_a_product_of_a_list, entered_again,
)  # fmt: skip


@pytest.fixture
def assert_same_under_autocast(device):
    return functools.partial(
        assert_trains_like_stock,
        x=random(*SHAPE, device=device),
        context=functools.partial(autocasting, device, BF16),
    )


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
def test_a_forward_under_autocast(fn, assert_same_under_autocast):
    options = dict(context=contextlib.nullcontext) if fn is entered_again else {}
    assert_same_under_autocast(fn, w=random(WIDTH, WIDTH), **options)


def test_a_write_before_autocast_ends_leaves_what_it_shares():
    def fn(model, x):
        h = model.f(x)
        y = model.g(torch.sin(h.float() * 2))
        h.mul_(0.5)  # what sin keeps is made of it, and now
        return model.f(h) + y

    @contextlib.contextmanager
    def without_a_context():
        torch.set_autocast_enabled("cpu", True)
        yield
        torch.clear_autocast_cache()
        torch.set_autocast_enabled("cpu", False)

    assert_trains_like_stock(fn, random(*SHAPE), without_a_context)


def test_a_thin_product_is_handed_to_the_next_block(assert_same_under_autocast):
    first = Block(lambda block, x: F.linear(x, block.w, block.b))
    first.w, first.b = nn.Parameter(random(16 * WIDTH, WIDTH)), nn.Parameter(random(16 * WIDTH))
    second = Block(lambda block, x: x + torch.tanh(block.o(torch.sin(x))))
    second.o = nn.Linear(16 * WIDTH, 16 * WIDTH)
    assert_same_under_autocast(lambda model, x: model.blocks(x), blocks=nn.Sequential(first, second))


@pytest.mark.parametrize("saved", ["_to_copy", "addmm", "mm"])
def test_selective_checkpointing_holds_what_is_shared(saved, assert_same_under_autocast):
    contexts = functools.partial(create_selective_checkpoint_contexts, [getattr(torch.ops.aten, saved).default])

    def fn(model, x):
        x = model.f(x)
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        return x

    def block(self, x):
        return x + self.down(F.gelu(self.up(x)))

    layers = nn.ModuleList([Block(block), Block(block)])
    for layer in layers:
        layer.up, layer.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
    assert_same_under_autocast(fn, layers=layers)


def test_blocks_share_a_weight_that_is_emptied_between_them(assert_same_under_autocast):
    first, second = (Block(lambda block, x: x + torch.tanh(block.f(torch.sin(x)))) for _ in range(2))
    second.f = first.f
    assert_same_under_autocast(lambda model, x: model.blocks(model.f(x)), blocks=nn.Sequential(first, second, first))


def with_itself(model, x):
    """Hands on what it multiplies, too."""
    h = x.transpose(1, 2)
    return h, h @ h, F.scaled_dot_product_attention(h, h, h)


@pytest.mark.parametrize("which", [1, 2], ids=["matmul", "sdpa"])
def test_a_product_of_a_tensor_with_itself_which_others_read_too(which, device):
    """Three gradients meet, and their sum depends on the order in which the conversions were made."""

    def run(model):
        found = []
        for seed in range(20):
            x = random(2, 8, 8, device=device, seed=seed).requires_grad_()
            with autocasting(device, BF16):
                out = model(x)
            seeds = [random(*t.shape, device=device, seed=100 + seed).to(t.dtype) for t in (out[0], out[which], x)]
            found += torch.autograd.grad([out[0], out[which], x], x, seeds)
        return found

    assert_alike(lambda: Attack(with_itself).to(device), run)
