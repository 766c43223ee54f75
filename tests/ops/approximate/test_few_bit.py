"""``few_bit``: stock's forward, a step function for a slope, and b bits an element; and the codec of its codes."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, QuickGELUActivation, SiLUActivation

from hf_memsave.errors import ConfigError, PatchError
from hf_memsave.ops.approximate.elementwise import ACTIVATIONS, required_name
from hf_memsave.ops.approximate.few_bit import FewBit, few_bit
from hf_memsave.ops.approximate.few_bit_tables import RANGE, Levels, levels
from hf_memsave.tape.codecs import pack_bits, pack_codes, unpack_bits, unpack_codes
from support.helpers import (
    DTYPES,
    LAYOUTS,
    assert_backward_twice,
    assert_same_bits,
    kept,
    nbytes,
    random,
    run,
    swapped,
    taping,
)
from support.pairs import pairwise
from support.slopes import PLANTED, assert_errs_by_slope

BITS = range(1, 9)
MODULES = (
    nn.GELU, partial(nn.GELU, "tanh"), nn.SiLU, GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation,
    QuickGELUActivation,
)  # fmt: skip
#: Largest and L2 error on [-10, 10] of FewBit's own tables (1 to 4 bits), as InvAct's Fig. 5 has them.
PUBLISHED = {"gelu": (0.376, 0.211, 0.110, 0.064), "silu": (0.464, 0.242, 0.165, 0.073)}


def bound(module, bits):
    return swapped(module, "activation", FewBit(bits))


def frozen(module):
    """``module`` before a linear whose weight is frozen: nothing else keeps its output."""
    weight = nn.Linear(8, 2).requires_grad_(False)
    return lambda x: weight.to(x)(module(x))


def l2(name, table):
    """The root of the integral of the squared error on [-10, 10]."""
    edges = torch.linspace(-RANGE, RANGE, 200_001, dtype=torch.float64)
    slopes = (ACTIVATIONS[name](edges).diff() / edges.diff()).numpy()
    middles = ((edges[1:] + edges[:-1]) / 2).numpy()
    found = table.levels[np.searchsorted(table.boundaries, middles, side="right")]
    return float(np.sqrt(np.mean((found - slopes) ** 2) * 2 * RANGE))


@pytest.mark.parametrize(("build", "dtype"), pairwise(MODULES, DTYPES))
def test_few_bit_forward_is_stocks(device, build, dtype):
    x = random(500, dtype=dtype, device=device) * 8
    got, stock = run(bound(build(), 4), [x], tape=True), run(build(), [x])
    assert_same_bits(got.output, stock.output)
    assert_same_bits(got.of_consumer, stock.of_consumer)
    for shape in ((), (7,), (0, 4), (3, 5)):
        x = random(*shape, dtype=dtype, device=device)
        op = bound(build(), 4)
        assert kept(op, x, tape=True, linear=False) <= 4 * -(-x.numel() // 8) + -(-x.numel() // 1024)
        assert run(op, [x], tape=True).of_inputs[0].shape == shape


@pytest.mark.parametrize(("bits", "dtype"), pairwise(BITS, DTYPES))
def test_few_bit_backward_is_the_level_of_the_input(device, dtype, bits):
    x = (random(501, dtype=dtype, device=device) * 4).requires_grad_()
    dy = random(501, dtype=dtype, device=device, seed=3)
    with taping():
        bound(nn.GELU(), bits)(x).backward(dy)
    table = levels("gelu", bits)
    pieces = np.searchsorted(table.boundaries, x.detach().float().cpu().numpy(), side="right")
    expected = torch.from_numpy(table.levels[pieces]).to(device)
    assert_same_bits(x.grad, (dy * expected).to(dtype))


@pytest.mark.parametrize("bits", BITS)
def test_few_bit_keeps_its_bits_alone_before_a_frozen_linear(device, bits):
    """b/16 of bf16's bytes, and a byte for 1024 elements."""
    x = random(3, 16, 8, dtype=torch.bfloat16 if bits % 2 else torch.float32, device=device)
    with torch.no_grad():
        assert kept(frozen(bound(nn.GELU(), bits)), x, tape=True, linear=False) == x.numel() * bits // 8 + 1
        assert kept(frozen(nn.GELU()), x, tape=False, linear=False) == nbytes(x)


#: Of a whole tensor, the product after it makes few_bit keep its input: the gradient is stock's.
PARTS = [view for view in LAYOUTS if view != "transposed"]


@pytest.mark.parametrize("view", LAYOUTS)
def test_few_bit_takes_views_and_wrong_levels_are_caught(device, view, monkeypatch):
    x, see = random(4, 5, 8, device=device), LAYOUTS[view]
    leaf = x.double().requires_grad_()
    seen = see(leaf)
    incoming = random(*seen.shape, device=device, seed=1) * random(*seen.shape, device=device, seed=2)
    (size,) = torch.autograd.grad(seen, leaf, incoming.abs().double())  # of what meets in an element, the sum

    def check():
        got, stock = (run(lambda x: op(see(x)), [x], tape=True) for op in (bound(nn.SiLU(), 8), nn.SiLU()))  # noqa: B023
        assert_errs_by_slope(got.of_inputs[0], stock.of_inputs[0].double(), size, 0.0045, 1e-5)

    def wrong(name, bits):
        table = levels(name, bits)
        return Levels(table.boundaries, (table.levels * PLANTED).astype(table.levels.dtype))

    check()
    if view in PARTS:
        monkeypatch.setattr("hf_memsave.ops.approximate.few_bit.levels", wrong)
        with pytest.raises(AssertionError, match="too far"):
            check()


def test_few_bit_runs_backward_twice_but_not_double(device):
    op = bound(nn.SiLU(), 4)
    assert_backward_twice(op, random(3, 8, device=device))
    x = random(3, 8, device=device).requires_grad_()
    with taping():
        (dx,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_levels_halve_the_error_with_each_bit_and_are_no_worse_than_published(name):
    errors = [l2(name, levels(name, bits)) for bits in BITS]
    assert all(after < 0.62 * before for before, after in zip(errors, errors[1:], strict=False))
    assert errors[7] < 0.005
    assert all(error < published * 1.002 for error, published in zip(errors, PUBLISHED.get(name, ()), strict=False))


@pytest.mark.parametrize(("name", "bits"), [("gelu", 2), ("silu", 3), ("gelu", 1)])
def test_levels_are_the_best_nearby(name, bits):
    table = levels(name, bits)
    best = l2(name, table)
    assert np.all(np.diff(table.boundaries) > 0)
    for array in table:
        for i, value in enumerate(array.copy()):
            for change in (-0.05, 0.05):
                array[i] = value + change
                assert l2(name, table) > best
                array[i] = value


@pytest.mark.parametrize("bits", [0, 9, -1, 2.0, "4", True, None])
def test_few_bit_refuses_other_numbers_of_bits(device, bits):
    with pytest.raises(ConfigError, match="few_bits must be a whole number from 1 to 8, got"):
        few_bit(random(3, device=device), "gelu", nn.GELU(), bits)


def test_few_bit_refuses_an_unknown_activation(device):
    for ask in (lambda: levels("mish", 4), lambda: required_name(nn.Mish())):
        with pytest.raises(PatchError, match="has no fit: expected one of gelu, .*fit_inverse.py"):
            ask()


@pytest.mark.parametrize("bits", BITS)
def test_codes_come_back(device, bits):
    for shape in ((), (1,), (8,), (3, 5), (0,), (2, 0, 3)):
        codes = torch.randint(2**bits, shape, dtype=torch.uint8, device=device)
        packed = pack_codes(codes, bits)
        assert packed.nbytes == bits * -(-codes.numel() // 8)
        assert torch.equal(unpack_codes(packed, codes.numel()).view(shape), codes)
    flags = random(1001, device=device) > 0
    packed = pack_bits(flags)
    assert packed.nbytes == 126
    assert torch.equal(unpack_bits(packed, 1001), flags)
