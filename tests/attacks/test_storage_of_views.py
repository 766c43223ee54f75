"""Attacks on codes of 8 and 4 bits: what lies beside a view in its storage, and numbers as large as they get."""

import pytest
import torch

from hf_memsave import MemSaveConfig, measure_kept
from hf_memsave.tape.quantize import FORMATS, decode, encode
from support.attacks import WIDTH, pair
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
    model, _ = pair(lambda model, x: model.g(view(model, x, rest)).sin(), device, MemSaveConfig(storage=kind))
    loss = model(random(16, 8, WIDTH, device=device)).pow(2).mean()
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_a_view_is_coded_and_the_rest_of_its_storage_is_not(kind, view, device):
    expected = trained(view, kind, 0.0, device)
    for rest in REST:
        assert_same(trained(view, kind, rest, device), expected)
    ours, coded = (
        pair(lambda model, x: model.g(view(model, x, 0.0)).sin(), device, config)[0]
        for config in (True, MemSaveConfig(storage=kind))
    )
    x = random(16, 8, WIDTH, device=device)
    before, after = (measure_kept(model, x).total for model in (ours, coded))
    assert after < before - x.nbytes // 2


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_beside_the_largest_stays_and_so_do_they(kind, device):
    form = FORMATS[kind]
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = random(4 * form.block, device=device).sign() * torch.finfo(torch.float32).max
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

    ours, stock = pair(repeated, device, MemSaveConfig(storage=kind))
    for model in (stock, ours):
        model(3 * random(16, 8, WIDTH, device=device)).sum().backward()
    got, expected = ours.f.weight.grad, stock.f.weight.grad
    assert (got - expected).norm() <= {"int8": 0.02, "int4": 0.3}[kind] * expected.norm()
