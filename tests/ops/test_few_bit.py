"""``few_bit``: stock's forward, a step function for a slope, and b bits an element; and the codec of its codes."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, QuickGELUActivation, SiLUActivation

from hf_memsave.errors import ConfigError, PatchError
from hf_memsave.ops.elementwise import ACTIVATIONS, required_name
from hf_memsave.ops.few_bit import FewBit, few_bit, kept_bytes
from hf_memsave.ops.few_bit_tables import RANGE, Levels, levels
from hf_memsave.tape.codecs import pack_bits, pack_codes, unpack_bits, unpack_codes
from support.helpers import (
    DTYPES,
    LAYOUTS,
    assert_backward_twice,
    assert_same_bits,
    kept,
    random,
    run,
    swapped,
    taping,
)
from support.slopes import PLANTED, assert_errs_by_slope

BITS = range(1, 9)
MODULES = (nn.GELU, partial(nn.GELU, "tanh"), nn.SiLU, GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation)
#: Largest and L2 error on [-10, 10] of FewBit's own tables (1 to 4 bits), as InvAct's Fig. 5 has them.
PUBLISHED = {"gelu": (0.376, 0.211, 0.110, 0.064), "silu": (0.464, 0.242, 0.165, 0.073)}


@pytest.fixture(params=[*MODULES, QuickGELUActivation], ids=str)
def module(request):
    return request.param()


@pytest.fixture
def op(module):
    return bound(module, 4)


def bound(module, bits):
    return swapped(copy.deepcopy(module), "activation", FewBit(bits))


def frozen(module):
    """``module`` as the model runs it before a linear whose weight is frozen: nobody else keeps its output."""
    weight = nn.Linear(8, 2).requires_grad_(False)
    return lambda x: weight.to(x)(module(x))


def l2(name, table):
    """The root of the integral of the squared error on [-10, 10]."""
    edges = torch.linspace(-RANGE, RANGE, 200_001, dtype=torch.float64)
    slopes = (ACTIVATIONS[name].forward(edges).diff() / edges.diff()).numpy()
    middles = ((edges[1:] + edges[:-1]) / 2).numpy()
    found = table.levels[np.searchsorted(table.boundaries, middles, side="right")]
    return float(np.sqrt(np.mean((found - slopes) ** 2) * 2 * RANGE))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_bit_forward_is_stocks(device, module, op, dtype):
    x = random(500, dtype=dtype, device=device) * 8
    got, stock = run(op, [x], tape=True), run(module, [x])
    assert_same_bits(got.output, stock.output)
    assert_same_bits(got.of_consumer, stock.of_consumer)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_few_bit_keeps_its_bits_alone_before_a_frozen_linear(device, dtype, bits):
    x = random(3, 16, 8, dtype=dtype, device=device)
    claim = kept_bytes(tuple(x.shape), x.itemsize, bits)
    with torch.no_grad():
        assert kept(frozen(bound(nn.GELU(), bits)), x, tape=True, linear=False) == claim.here
        assert kept(frozen(nn.GELU()), x, tape=False, linear=False) == claim.eager
    assert claim.here == x.numel() * bits // 8 + 1  # b/16 of bf16, and a byte for 1024 elements


@pytest.mark.parametrize("shape", [(), (7,), (0, 4), (3, 5)], ids=str)
def test_few_bit_takes_odd_shapes(device, op, shape):
    x = random(*shape, device=device)
    assert kept(op, x, tape=True, linear=False) <= kept_bytes(shape, 4).here
    assert run(op, [x], tape=True).of_inputs[0].shape == shape


@pytest.mark.parametrize("view", LAYOUTS)
def test_few_bit_takes_views(device, view):
    x = random(4, 5, 8, device=device)
    got, stock = (run(lambda x, op=op: op(LAYOUTS[view](x)), [x], tape=True) for op in (bound(nn.SiLU(), 8), nn.SiLU()))
    assert_errs_by_slope(
        got.of_inputs[0], stock.of_inputs[0].double(), size_of_incoming(x, LAYOUTS[view]), 0.0045, 1e-5
    )


def size_of_incoming(x, view):
    """What ``run`` multiplies the slopes by, back through ``view``; of what meets in an element, the sum."""
    leaf = x.double().requires_grad_()
    seen = view(leaf)
    incoming = random(*seen.shape, device=x.device, seed=1) * random(*seen.shape, device=x.device, seed=2)
    return torch.autograd.grad(seen, leaf, incoming.abs().double())[0]


#: Of a whole tensor, the product after it makes few_bit keep its input: the gradient is stock's.
PARTS = [view for view in LAYOUTS if view != "transposed"]


@pytest.mark.parametrize("view", PARTS)
def test_few_bit_with_wrong_levels_is_caught(device, view, monkeypatch):
    def wrong(name, bits):
        table = levels(name, bits)
        return Levels(table.boundaries, (table.levels * PLANTED).astype(table.levels.dtype))

    monkeypatch.setattr("hf_memsave.ops.few_bit.levels", wrong)
    with pytest.raises(AssertionError, match="too far"):
        test_few_bit_takes_views(device, view)


def test_few_bit_runs_backward_twice_but_not_double(device):
    op = bound(nn.SiLU(), 4)
    assert_backward_twice(op, random(3, 8, device=device))
    x = random(3, 8, device=device).requires_grad_()
    with taping():
        (dx,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_levels_halve_the_error_with_each_bit(name):
    errors = [l2(name, levels(name, bits)) for bits in BITS]
    assert all(after < 0.62 * before for before, after in zip(errors, errors[1:], strict=False))
    assert errors[7] < 0.005


@pytest.mark.parametrize("name", PUBLISHED)
def test_levels_are_no_worse_than_published(name):
    for bits, published in enumerate(PUBLISHED[name], start=1):
        assert l2(name, levels(name, bits)) < published * 1.002


@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize("name", PUBLISHED)
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


def test_a_worse_table_is_caught():
    table = levels("gelu", 2)
    assert l2("gelu", Levels(table.boundaries, table.levels + 0.02)) > l2("gelu", table) + 1e-3


@pytest.mark.parametrize("bits", [0, 9, -1, 2.0, "4", True, None])
def test_few_bit_refuses_other_numbers_of_bits(device, bits):
    with pytest.raises(ConfigError, match="few_bits must be a whole number from 1 to 8, got"):
        few_bit(random(3, device=device), "gelu", nn.GELU(), bits)


def test_few_bit_refuses_an_unknown_activation(device):
    for ask in (lambda: levels("mish", 4), lambda: required_name(nn.Mish())):
        with pytest.raises(PatchError, match="has no fit: expected one of gelu, .*fit_inverse.py"):
            ask()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(), (1,), (8,), (3, 5), (0,), (2, 0, 3)], ids=str)
def test_codes_come_back(device, bits, shape):
    codes = torch.randint(2**bits, shape, dtype=torch.uint8, device=device)
    packed = pack_codes(codes, bits)
    assert packed.nbytes == bits * -(-codes.numel() // 8)
    assert torch.equal(unpack_codes(packed, codes.numel()).view(shape), codes)


def test_any_boolean_is_one_bit(device):
    flags = random(1001, device=device) > 0
    packed = pack_bits(flags)
    assert packed.nbytes == 126
    assert torch.equal(unpack_bits(packed, 1001), flags)
