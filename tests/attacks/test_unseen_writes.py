"""Writes in the forward that no version tells, above all to parameters and buffers: gradients are stock's bits."""

import ctypes
import functools
import gc
import weakref
from collections import namedtuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_memsave import MemSaveConfig, patch
from support.attacks import WIDTH, Attack, assert_trains_like_stock, pair
from support.helpers import kept, only_on_cpu, random
from support.tapes import STATIC, is_trusted
from support.zoo import batch_for, build

SHAPE = (4, 8, WIDTH)
Triple = namedtuple("Triple", "a b c")


def codebook(model, x):
    """Van den Oord et al. (2017), appendix A.1: codes that follow the mean of what they stand for."""
    z = model.f(x)
    index = torch.cdist(z, model.codes.expand(len(z), 8, WIDTH)).argmin(-1)
    q, chosen = model.codes[index], F.one_hot(index, 8).float().flatten(0, 1)
    model.sizes.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
    model.sums.data.mul_(0.9).add_(chosen.t() @ z.flatten(0, 1).detach(), alpha=0.1)
    model.codes.data.copy_(model.sums / (model.sizes[:, None] + 1e-5))
    return model.g(z + (q - z).detach()) + F.mse_loss(z, q)


def scaled(model, x, write=lambda scale: scale.data.mul_(0.5)):
    """A parameter that is written to before anything that was made from it is kept."""
    h = model.f(x)
    y = h * model.scale
    write(model.scale)
    return model.g(y) + h * h


@torch.no_grad()
def fused_step(scale):
    options = dict(weight_decay=0.0, momentum=0.0, lr=0.5, dampening=0.0, nesterov=False, maximize=False)
    torch._fused_sgd_([scale], [torch.ones_like(scale)], [], is_first_step=True, **options)


def twice_normed(model, x):
    """A norm whose weight is written to between two uses: a copy of it must be of its own."""
    h = model.f(x)
    y = model.g(model.norm(h))
    model.norm.weight.data.mul_(1.5)
    return y + model.h(model.norm(h))


def thin(model, x):
    """A product that runs again reads its weight."""
    h = model.f(x)
    y = model.b(model.a(h))
    z = model.g(y * h)
    model.b.weight.data.mul_(2)
    return z + model.h(y + h)


def eval_then_train(model, x):
    """A batch norm whose statistics are read, and then moved on."""
    h = model.f(x).transpose(1, 2).contiguous()
    y, z = model.norm.eval()(h), model.norm.train()(h)
    return model.conv(y) + z + h * h


def read_before(model, x):
    """Statistics that another function reads before their update."""
    h = model.f(x)
    y = h - model.norm.running_mean
    z = model.norm(h.transpose(1, 2)).transpose(1, 2)
    return model.g(y) + z + h * h


def named_statistics(x, mean, var):
    options = dict(training=True, momentum=0.1, eps=1e-5, cudnn_enabled=False)
    torch.batch_norm(x, weight=None, bias=None, running_mean=mean, running_var=var, **options)


STATISTICS = (
    torch.no_grad()(lambda x, mean, var: F.batch_norm(x, mean, var, training=True)),
    lambda x, mean, var: torch.batch_norm(x, None, None, mean, var, True, 0.1, 1e-5, False),
    named_statistics,
)


def of_no_module(model, x, update):
    mean, var, h = torch.randn(WIDTH), torch.ones(WIDTH), model.f(x)  # drawn: zeros would be made again
    square, y = h * h, h - mean  # h is kept, so y would be made again
    update(h.flatten(0, 1) + 1, mean, var)
    return model.g(y) + square


def moving_slice(model, x):
    """Bounds that are tensors, and move on."""
    h = model.f(x)
    h, low, high, rows, found = h * h.sigmoid(), torch.tensor(0), torch.tensor(4), torch.arange(4), []
    for _ in range(2):
        found.append(F.linear(F.pad(h[rows, low:high], (0, 0, 0, 0)), model.g.weight))
        low += 2
        high += 2
    return torch.cat(found, 1)


def dropped_by_tensor(model, x):
    p = torch.tensor(0.3)
    y = F.dropout1d(model.f(x), p, True)
    return model.g(F.dropout(y, p, True)) + F.alpha_dropout(y, p, True)


def complex_convolution(model, x):
    """Frozen, and several convolutions of reals, which keep weights of their own."""
    return model.conv(torch.complex(model.f(x), model.g(x)).transpose(1, 2))


def fresh_noise(model, x):
    """A tensor that ``nn.init`` fills again."""
    noise, h = torch.empty(8, WIDTH), model.f(x)
    for layer in (model.g, model.h):
        nn.init.normal_(noise)
        h = layer(h) * noise.repeat(4, 1, 1)
    return h


def short_rows(model, x):
    """An embedding that shortens the rows of a weight which others read, under autocast."""
    weight = model.embedding.weight
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(F.linear(x, weight), weight) + model.embedding(torch.arange(8))


def queue_of_keys(model, x):
    """As MoCo keeps one: used, and then filled."""
    query = F.normalize(model.f(x.mean(1)), dim=-1)
    out = query @ model.queue.clone().detach()
    with torch.no_grad():
        model.queue[:, :4] = query.T
    return out


def assigned_data(model, x):
    a = model.f(x).detach()
    out = model.o(torch.cat([a, a * 3, a * 2], -1))
    a.data = torch.zeros_like(a)
    return out


def parts_of_a_sequence(model, x, kind=list):
    a, b, c = model.f(x), model.g(x), model.h(x)
    out = model.o(torch.cat(kind([a, b, c]), -1))
    a.mul_(2)
    return out + a


def as_kernels_do(x):
    numbers = (ctypes.c_float * x.numel()).from_address(x.data_ptr())
    numbers[:] = [2 * number for number in numbers]


class Doubled(torch.autograd.Function):
    """Writes to what is not its own, and gives back what it has written to."""

    @staticmethod
    def forward(ctx, x, write):
        write(x)
        return x.view(x.shape)

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy, None


def by_address(model, x, write=as_kernels_do):
    """An activation, read before that by what is made again, and after; and a buffer."""
    h = model.f(x).tanh()
    before, shifted = h * 3, h + model.shift
    y = model.g(before)
    after = Doubled.apply(h, write)
    Doubled.apply(model.shift, write)
    return y + model.h(after) + model.o(torch.cat([shifted, after.sin(), after + model.shift], -1))


def batch_normed():
    return dict(norm=nn.BatchNorm1d(WIDTH), conv=nn.Conv1d(WIDTH, WIDTH, 1))


def with_scale():
    return dict(scale=nn.Parameter(torch.ones(WIDTH)))


#: Forward -> the parts of its model.
PROGRAMS = {
    codebook: lambda: dict(codes=(codes := torch.randn(8, WIDTH)), sizes=torch.ones(8), sums=codes.clone()),
    scaled: with_scale,
    functools.partial(scaled, write=fused_step): with_scale,
    twice_normed: lambda: dict(norm=nn.LayerNorm(WIDTH)),
    thin: lambda: dict(a=nn.Linear(WIDTH, 2, bias=False), b=nn.Linear(2, WIDTH, bias=False)),
    eval_then_train: batch_normed,
    read_before: batch_normed,
    **{functools.partial(of_no_module, update=update): dict for update in STATISTICS},
    moving_slice: dict,
    dropped_by_tensor: dict,
    complex_convolution: lambda: dict(conv=nn.Conv1d(WIDTH, 4, 3, dtype=torch.complex64).requires_grad_(False)),
    fresh_noise: dict,
    short_rows: lambda: dict(embedding=nn.Embedding(WIDTH, WIDTH, max_norm=1.0)),
    queue_of_keys: lambda: dict(queue=torch.randn(WIDTH, 64)),
    **{
        functools.partial(by_address, write=write): lambda: dict(shift=torch.randn(WIDTH))
        for write in (
            as_kernels_do,
            lambda x: np.multiply(x.numpy(), 2, out=x.numpy()),
            lambda x: np.multiply(x, 2, out=np.asarray(x)),
            lambda x: torch.from_dlpack(x.detach()).mul_(2),
        )
    },
    assigned_data: dict,
    parts_of_a_sequence: dict,
    functools.partial(parts_of_a_sequence, kind=tuple): dict,
    functools.partial(parts_of_a_sequence, kind=lambda items: Triple(*items)): dict,
}


@pytest.mark.parametrize("config", [MemSaveConfig(), MemSaveConfig(norm="stock", frozen=False)], ids=["exact", "part"])
@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: getattr(fn, "func", fn).__name__)
def test_a_write_in_the_forward_is_as_in_stock(fn, config, device):
    only_on_cpu(device)
    torch.manual_seed(0)
    assert_trains_like_stock(fn, random(*SHAPE).requires_grad_(), config=config, **PROGRAMS[fn]())


def test_what_was_written_to_is_trusted_again_by_the_next_forward(device):
    for fn in (codebook, scaled, twice_normed, thin):
        torch.manual_seed(0)
        model, _ = pair(fn, device, **PROGRAMS[fn]())
        model(random(*SHAPE, device=device)).sum().backward()
        assert all(map(is_trusted, (*model.parameters(), *model.buffers())))
    norm, x = nn.LayerNorm(16), torch.randn(4, 16)
    reads_data = lambda x: (norm.weight.data.is_cpu, norm(x))[1]  # noqa: E731  # as ZeRO does, which costs nothing
    assert kept(reads_data, x, True) == kept(norm, x, True)


def test_parameters_remember_nothing_of_what_was_made_from_them():
    model = nn.Sequential(*(Attack(lambda model, x: F.linear(x, model.f.weight * 0.5).relu()) for _ in range(2)))
    patch(model)
    for length in range(1, 20):
        model(torch.randn(length, WIDTH)).sum().backward()
    assert all(known.recomputable == () for known in STATIC)


def test_a_batch_that_lives_on_holds_no_model():
    model = build("llama")
    patch(model)
    batch = batch_for(model)
    model(**batch).loss.backward()
    weight = weakref.ref(model.lm_head.weight)
    del model
    gc.collect()
    assert weight() is None and batch
