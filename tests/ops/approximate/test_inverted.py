"""``inverted`` and ``precision_bit``: stock's forward, the slope of the output, and the output is all that is kept."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import activations

from hf_memsave.errors import KeptTensorChangedError
from hf_memsave.ops.approximate.activation import ACTIVATION
from hf_memsave.ops.approximate.inverse import FITS, name_of, slope, wide
from hf_memsave.ops.approximate.inverted import decode, encode, inverted
from support import helpers
from support.pairs import pairwise

#: What to build, by the name of what it computes; and other classes that compute it.
KINDS = {
    "gelu": nn.GELU, "gelu_tanh": partial(nn.GELU, "tanh"), "silu": nn.SiLU, "new_gelu": activations.NewGELUActivation,
    "quick_gelu": activations.QuickGELUActivation,
}  # fmt: skip
OTHERS = {"GELUActivation": "gelu", "GELUTanh": "gelu_tanh", "SiLUActivation": "silu"}
VALUES = ("invert", "precision_bit")


@pytest.fixture(params=VALUES)
def value(request):
    return request.param


def approximate(kind, value):
    return helpers.swapped(KINDS[kind](), "activation", value)


def gradient(op, kind, value, leaf, see=torch.clone, autocast=None):
    """The output of ``op`` for what ``see`` makes of ``leaf``, its gradient, and what the slope of the output makes."""
    with helpers.taping(), helpers.autocasting(leaf.device, autocast):
        y = op(see(leaf))
    x, fit, dy = see(leaf), FITS[kind], helpers.random(*y.shape, dtype=y.dtype, device=y.device, seed=3)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    y = y.detach()
    middle, ulp = (wide(y), fit.ulp(y.dtype)) if value == "invert" else (decode(y)[0], 2 * fit.ulp(y.dtype))
    expected = (dy * slope(middle, x < fit.turn, fit, ulp)).to(y.dtype).to(x.dtype)
    return y, dx, torch.autograd.grad(x, leaf, expected)[0]


def test_inverted_knows_its_modules_and_refuses_others(value):
    made = {**{make: name for name, make in KINDS.items()}, **{getattr(activations, k): v for k, v in OTHERS.items()}}
    for make, name in made.items():
        assert name_of(make()) == name
        assert ACTIVATION.check(make(), value) == ""
    for module, reason in (
        (nn.SiLU(inplace=True), "inplace=True"),
        (activations.GELUActivation(use_gelu_python=True), "expected torch's own gelu"),
        (activations.GELUTanh(use_gelu_tanh_python=True), "expected torch's own gelu"),
    ):
        assert reason in ACTIVATION.check(module, value)
    assert name_of(nn.ELU()) is None and ACTIVATION.check(nn.ELU(), value) == "it has no fit"


@pytest.mark.parametrize(("kind", "value", "dtype"), pairwise(KINDS, VALUES, helpers.DTYPES))
def test_inverted_forward_is_stocks_and_backward_the_slope_of_the_output(device, kind, value, dtype):
    """``precision_bit`` changes one unit in the last place at most. (How near slopes are is in test_inverse.py.)"""
    x = torch.cat(
        [helpers.random(500, dtype=dtype, device=device) * 8, torch.tensor([1e9, -1e9, 0.0, -0.0]).to(device, dtype)]
    )
    op = approximate(kind, value)
    got, stock = helpers.run(op, [x], tape=True), helpers.run(KINDS[kind](), [x])
    if value == "invert":
        helpers.assert_same_bits(got.output, stock.output)
        helpers.assert_same_bits(got.of_consumer, stock.of_consumer)
    else:
        assert (helpers.bits(got.output).long() - helpers.bits(stock.output).long()).abs().max() == 1
    _, dx, expected = gradient(op, kind, value, (helpers.random(500, dtype=dtype, device=device) * 4).requires_grad_())
    helpers.assert_same_bits(dx, expected)


@pytest.mark.parametrize(
    ("kind", "value", "dtype", "shape"),
    pairwise(KINDS, VALUES, helpers.DTYPES, [(3, 5, 8), (7,), (), (0, 4), (2, 0, 4)]),
)
def test_inverted_keeps_its_output_and_bits(device, kind, value, dtype, shape):
    x = helpers.random(*shape, dtype=dtype, device=device)
    of_bits = -(-x.numel() // 8) if value == "invert" else 0
    assert helpers.kept(approximate(kind, value), x, tape=True, linear=bool(shape)) == helpers.nbytes(x) + of_bits


@pytest.mark.parametrize("view", helpers.LAYOUTS)
def test_inverted_takes_views(device, value, view):
    see, leaf = helpers.LAYOUTS[view], helpers.random(4, 5, 8, device=device).requires_grad_()
    y, dx, expected = gradient(approximate("gelu", value), "gelu", value, leaf, see)
    assert helpers.layout(y) == helpers.layout(F.gelu(see(leaf)))
    helpers.assert_same_bits(dx, expected)


def test_inverted_runs_backward_twice_and_again_but_not_double_nor_after_a_write(device, value):
    op, x = approximate("silu", value), helpers.random(3, 8, device=device)

    def block(x):
        with helpers.taping():
            return op(x).square()

    helpers.assert_same_bits(op(x), F.silu(x), "stock without a gradient")
    helpers.assert_backward_twice(op, x)
    helpers.assert_same_result(
        helpers.run(lambda x: checkpoint(block, x, use_reentrant=False), [x]), helpers.run(block, [x])
    )
    x.requires_grad_()
    with helpers.taping():
        (dx,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
    with helpers.taping():
        y = op(x)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(KeptTensorChangedError):
        y.sum().backward()


def test_an_activation_that_was_made_another_since_has_its_own_slope(device, value):
    op, x = helpers.swapped(activations.GELUActivation(), "activation", value), helpers.random(3, 8, device=device)
    op.act = torch.tanh
    helpers.assert_same_result(helpers.run(op, [x], tape=True), helpers.run(torch.tanh, [x]))


@pytest.mark.parametrize("kind", ["gelu", "new_gelu"])
def test_inverted_under_autocast(device, kind, value):
    low, leaf = torch.bfloat16, helpers.random(3, 8, dtype=torch.bfloat16, device=device).requires_grad_()
    y, dx, expected = gradient(approximate(kind, value), kind, value, leaf, autocast=low)
    with helpers.autocasting(device, low):
        stock = KINDS[kind]()(leaf)
        assert inverted(helpers.random(3, device=device).requires_grad_(), "gelu", F.gelu).dtype == torch.float32
    assert y.dtype == stock.dtype and dx.dtype == low
    helpers.assert_same_bits(dx, expected)
    if value == "invert":
        helpers.assert_same_bits(y, stock)


@pytest.mark.parametrize("dtype", helpers.DTYPES, ids=str)
def test_precision_bit_survives_every_kind_of_number(device, dtype):
    info = torch.finfo(dtype)
    y = torch.tensor([0.0, -0.0, float("inf"), info.max, info.tiny, 1.0], dtype=dtype, device=device)
    middle, m = decode(encode(y, y.isnan()))
    assert not m.any()
    helpers.assert_same_bits(middle[2], torch.tensor(float("inf"), dtype=middle.dtype, device=device))
    low = torch.tensor([-0.0, -info.tiny, -0.125], dtype=dtype, device=device)
    middle, m = decode(encode(low, low == low))
    assert m.all()
    assert ((middle - low).abs() <= info.eps * low.abs() + info.tiny * info.eps).all()
    assert decode(encode(torch.full((2,), float("nan"), dtype=dtype), low[:2].cpu() > 0))[0].isnan().all()
