"""Approximate ops where numbers are not plain: NaN, infinities, the largest and the smallest, γ near 0 or below."""

import pytest
import torch
from torch import nn

from hf_memsave.ops.approximate.few_bit import FewBit, levels
from hf_memsave.ops.approximate.output_norm import is_well
from support.helpers import DTYPES, assert_same_bits, random, swapped, taping
from support.output_norms import KINDS, from_output, gradients, module_of, truth_of
from support.pairs import pairwise
from support.slopes import SLOPE

VALUES = {"invert": "invert", "precision_bit": "precision_bit", "few_bit 1": FewBit(1), "few_bit 8": FewBit(8)}
#: The largest error of a slope where few bits are kept.
FEW = {"few_bit 1": 0.51, "few_bit 8": 0.005}


def odd(dtype, device):
    info = torch.finfo(dtype)
    values = [info.smallest_normal, info.smallest_normal / 4, info.tiny, 0.0, info.max, info.max / 2, float("inf")]
    return torch.tensor([*values, *(-v for v in values), float("nan")], dtype=torch.float64).to(device, dtype)


@pytest.mark.parametrize(
    ("make", "value", "dtype"), pairwise([nn.GELU, lambda: nn.GELU("tanh"), nn.SiLU], VALUES, DTYPES)
)
def test_an_activation_of_odd_numbers(make, value, dtype, device):
    """The slope of every number but NaN is near stock's where that is a number; and NaN has none.

    Of infinity, what is told from y has the slope there, and few bits have NaN as stock's.
    """
    x = odd(dtype, device)
    module, found = swapped(make(), "activation", VALUES[value]), []
    for layer in (module, make()):
        leaf = x.clone().requires_grad_()
        with taping():
            y = layer(leaf)
        found.append((y.detach(), torch.autograd.grad(y, leaf, torch.ones_like(y))[0]))
    (y, dx), (stock, slope) = found
    if value != "precision_bit":
        assert_same_bits(y, stock)
    assert y[-1].isnan() and dx[-1].isnan()
    assert not value.startswith("few_bit") or dx[~x.isfinite()].isnan().all()
    near = stock.isfinite() & slope.isfinite()
    near &= x > -torch.finfo(dtype).max / 4  # below, stock's tanh formula gives NaN or 0 by dtype
    assert near.sum() > 6
    largest = FEW.get(value) or (1.5 if value == "precision_bit" else 1) * SLOPE[dtype]
    assert ((dx - slope).abs()[near] <= largest).all(), (dx, slope)


@pytest.mark.parametrize(("bits", "bad"), [(1, float("nan")), (2, float("inf")), (4, -float("inf")), (8, float("nan"))])
def test_few_bit_of_what_is_not_finite_is_nan_there_alone(bits, bad, device):
    """In its group the last two pieces have one level; in all other groups nothing changes."""
    x = 4 * random(5000, device=device)
    x[1500] = bad
    found = []
    for values in (x, x.nan_to_num(0.0, 0.0, 0.0)):
        leaf = values.clone().requires_grad_()
        y = swapped(nn.GELU(), "activation", FewBit(bits))(leaf)
        found.append(torch.autograd.grad(y, leaf, torch.ones_like(y))[0])
    got, expected = found
    assert got.isnan().nonzero().tolist() == [[1500]]
    last = torch.from_numpy(levels("gelu", bits).levels[-2:]).to(device)
    is_last = (expected[1024:2048, None] == last).any(1)
    expected[1024:2048][is_last], expected[1500] = last.mean(), torch.nan
    torch.testing.assert_close(got, expected, equal_nan=True)


def norm(kind, width, dtype, device):
    """With every kind of γ, and a β that stays below."""
    info, weight = torch.finfo(dtype), 1 + 0.1 * random(width, seed=1)
    weight[1::2] *= -1
    weight = weight.to(device, dtype)
    weight[0], weight[8], weight[16], weight[24] = 0.0, info.smallest_normal, -info.smallest_normal / 2, -0.0
    weight[4] = 9 * info.tiny
    return module_of(kind, weight, 0.3 * weight * random(width, seed=2).sign().to(weight))


@pytest.mark.parametrize(("kind", "dtype"), pairwise(KINDS, [torch.float32, torch.bfloat16, torch.float16]))
def test_output_norm_with_every_kind_of_gamma(kind, dtype, device):
    """0, -0, tiny, subnormal and negative ones: as near to the truth as stock, times two."""
    module = norm(kind, 64, dtype, device)
    assert is_well(module.weight, None).logical_not().nonzero().flatten().tolist() == [0, 8, 16, 24]
    x, dy = random(128, 64, dtype=dtype, device=device), random(128, 64, dtype=dtype, device=device, seed=9)
    (y, got), (stock_y, stock) = (gradients(module, fn, x, dy) for fn in (from_output(module), module))
    assert_same_bits(y, stock_y)
    for mine, theirs, true in zip(got, stock, truth_of(kind, module, x, dy), strict=True):
        assert mine.isfinite().all()
        allowed = 2 * (theirs.double() - true).norm() + torch.finfo(dtype).eps * true.norm()
        assert (mine.double() - true).norm() <= allowed


#: The largest relative error of a gradient beside stock's, of the numbers that are finite.
SLACK = {torch.float32: 5e-7, torch.float64: 1e-7, torch.bfloat16: 0.01, torch.float16: 1e-3}


def relative_error(got, true, where):
    """Of as large numbers as a dtype has, too."""
    size = float(true[where].abs().max()) if where.any() else 0.0
    if not size:
        return float(got[where].abs().sum())
    mine, theirs = got[where].double() / size, true[where].double() / size
    return float((mine - theirs).norm() / theirs.norm())


def all_three(kind, dtype, device, change):
    """The gradients of ours, of stock and in float64, where ``change`` has set some numbers of x, dy, γ and β."""
    module = norm(kind, 64, dtype, device)
    x, dy = (random(8, 64, dtype=dtype, device=device, seed=seed) for seed in (0, 9))
    change({"x": x, "dy": dy, **{name: parameter.data for name, parameter in module.named_parameters()}})
    (y, got), (stock_y, stock) = (gradients(module, fn, x, dy) for fn in (from_output(module), module))
    assert torch.equal(y.nan_to_num(), stock_y.nan_to_num())
    return list(zip(got, stock, truth_of(kind, module, x, dy), strict=True))


@pytest.mark.parametrize(
    ("kind", "dtype", "what", "bad"),
    [
        case
        for case in pairwise(KINDS, DTYPES, ["x", "dy", "weight", "bias"], [float("nan"), float("inf"), -float("inf")])
        if case[0] == "layer_norm" or case[2] != "bias"  # which others have not
    ],
)
def test_output_norm_where_one_number_is_not_finite(kind, dtype, what, bad, device):
    """Stock's gradients are not finite there, nor ours; all others are stock's."""

    def set_one(tensors):
        tensor = tensors[what]
        (tensor[3] if tensor.dim() == 2 else tensor)[5] = bad

    found = all_three(kind, dtype, device, set_one)
    for mine, theirs, _ in found:
        where = theirs.isfinite()
        assert torch.equal(mine.isfinite(), where)
        assert relative_error(mine, theirs, where) <= SLACK[dtype]
    assert all(theirs.isfinite().all() for _, theirs, _ in found) == (what == "bias"), "which no gradient depends on"
