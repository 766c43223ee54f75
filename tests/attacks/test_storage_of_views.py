"""Attacks on codes of 8 and 4 bits: what lies beside a view in its storage, and numbers as large as they get."""

import copy

import pytest
import torch

from hf_memsave import MemSaveConfig, measure_kept, patch
from hf_memsave.tape.quantize import FORMATS, decode, encode
from support.attacks import WIDTH, Attack
from support.helpers import assert_same_bits, random
from support.steps import assert_same, gradients

KINDS = tuple(FORMATS)
REST = (float("nan"), float("inf"), -float("inf"), 1e10, -3e38)


def columns(model, x, rest):
    """The view is the left half of each row."""
    buffer = x.new_full((*x.shape[:-1], 2 * WIDTH), rest)
    buffer[..., :WIDTH] = model.f(x)
    return buffer[..., :WIDTH]


def rows(model, x, rest):
    """The view is the first half of the memory."""
    buffer = x.new_full((2 * len(x), *x.shape[1:]), rest)
    buffer[: len(x)] = model.f(x)
    return buffer[: len(x)]


def every_second(model, x, rest):
    buffer = x.new_full((*x.shape, 2), rest)
    buffer[..., 0] = model.f(x)
    return buffer[..., 0]


def turned(model, x, rest):
    """A view that is dense in another order than its storage is long."""
    buffer = x.new_full((2 * WIDTH, *x.shape[:-1]), rest)
    buffer[:WIDTH] = model.f(x).movedim(-1, 0)
    return buffer[:WIDTH].movedim(0, -1)


def joined(model, x, rest):
    """No buffer: what follows in the storage was made with it."""
    return torch.cat([model.f(x), torch.full_like(x, rest)], -1)[..., :WIDTH]


VIEWS = (columns, rows, every_second, turned, joined)


def trained(view, kind, rest, device):
    torch.manual_seed(0)
    model = Attack(lambda model, x: model.g(view(model, x, rest)).sin()).to(device)
    patch(model, MemSaveConfig(storage=kind))
    loss = model(random(16, 8, WIDTH, device=device)).pow(2).mean()
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


@pytest.mark.parametrize("rest", REST, ids=str)
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_of_a_views_storage_is_not_coded(kind, view, rest, device):
    assert_same(trained(view, kind, rest, device), trained(view, kind, 0.0, device))


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_a_view_is_coded(kind, view, device):
    """Else the test above would compare what no code was made of."""
    torch.manual_seed(0)
    stock = Attack(lambda model, x: model.g(view(model, x, 0.0)).sin()).to(device)
    x = random(16, 8, WIDTH, device=device)
    ours, coded = copy.deepcopy(stock), copy.deepcopy(stock)
    patch(ours)
    patch(coded, MemSaveConfig(storage=kind))
    before, after = (measure_kept(model, x).total for model in (ours, coded))
    assert after < before - x.nbytes // 2


def largest(dtype):
    return torch.finfo(dtype).max


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("share", [1.0, 0.9, 0.51, 0.49], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_finite_numbers_stay_finite(kind, share, dtype, device):
    """Their distance is beyond what fp32 has, and each number is within a step of itself."""
    form = FORMATS[kind]
    x = (random(1000, device=device).clamp(-2, 2) / 2 * (share * largest(dtype))).to(dtype)
    x[:2] = torch.tensor([-share, share], dtype=torch.float64).mul(largest(dtype)).to(dtype)
    got = decode(*encode(x, form, torch.Generator(device).manual_seed(0)), form, x.numel(), dtype)
    assert got.isfinite().all()
    step = 2 * share * largest(dtype) / (2**form.bits - 1)
    slack = largest(dtype) * (2 * torch.finfo(dtype).eps + 4 * torch.finfo(form.bounds).eps)
    assert (got.double() - x.double()).abs().max() <= step + slack


@pytest.mark.parametrize("kind", KINDS)
def test_the_code_of_the_largest_numbers_is_unbiased(kind, device):
    form = FORMATS[kind]
    block = random(form.block, device=device).clamp(-2, 2) * 1.5e38
    x = block.repeat(4000)
    codes, bounds = encode(x, form, torch.Generator(device).manual_seed(0))
    found = decode(codes, bounds, form, x.numel(), x.dtype).double().view(4000, -1)
    error = found.mean(0) - block.double()
    spread = found.std(0) / 4000**0.5 + 1e-6 * block.double().abs()
    assert (error.abs() / spread).max() < 5
    planted = bounds[0, 1].double() / 20
    assert ((error - planted).abs() / spread).max() > 5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_beside_the_largest_stays_and_so_do_they(kind, bad, device):
    form = FORMATS[kind]
    x = random(4 * form.block, device=device).sign() * largest(torch.float32)
    x[form.block + 3] = bad
    got = decode(*encode(x, form), form, x.numel(), x.dtype)
    torch.testing.assert_close(got, x, equal_nan=True, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_large_numbers_change_nothing_for_other_blocks(kind, device):
    form = FORMATS[kind]
    x = random(4 * form.block, device=device)
    y = x.clone()
    y[: form.block] *= 1e38
    found = [decode(*encode(t, form, torch.Generator(device).manual_seed(0)), form, t.numel(), t.dtype) for t in (x, y)]
    assert_same_bits(found[1][form.block :], found[0][form.block :])


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_that_repeats_a_part_is_not_the_whole_storage(kind, device):
    """Expanded to as many elements as its storage has: its code is none of the storage."""

    def repeated(model, x):
        h = model.f(x)
        return h[:, :1].expand_as(h).sin() + 2 * h.sin()

    torch.manual_seed(0)
    stock = Attack(repeated).to(device)
    ours = copy.deepcopy(stock)
    patch(ours, MemSaveConfig(storage=kind))
    for model in (stock, ours):
        model(3 * random(16, 8, WIDTH, device=device)).sum().backward()
    got, expected = ours.f.weight.grad, stock.f.weight.grad
    assert (got - expected).norm() <= {"int8": 0.02, "int4": 0.3}[kind] * expected.norm()
