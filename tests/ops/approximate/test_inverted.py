"""``inverted`` and ``precision_bit``: stock's forward, the slope of the output, and the output is all that is kept."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.activations import (
    GELUActivation,
    GELUTanh,
    MishActivation,
    NewGELUActivation,
    QuickGELUActivation,
    SiLUActivation,
)

from hf_memsave.errors import KeptTensorChangedError, PatchError
from hf_memsave.ops.approximate.activation import ACTIVATION
from hf_memsave.ops.approximate.elementwise import ACTIVATIONS, name_of, required_name
from hf_memsave.ops.approximate.inverse import FITS, slope, wide
from hf_memsave.ops.approximate.inverted import decode, encode, fit_of, inverted
from support.helpers import (
    DTYPES,
    LAYOUTS,
    assert_backward_twice,
    assert_same_bits,
    assert_same_result,
    autocasting,
    bits,
    kept,
    layout,
    nbytes,
    random,
    run,
    swapped,
    taping,
)
from support.pairs import pairwise
from support.slopes import PLANTED, SLOPE, assert_errs_by_slope

#: How to build the module, and the name of what it computes.
KINDS = {
    "gelu": (nn.GELU, "gelu"),
    "gelu-tanh": (partial(nn.GELU, "tanh"), "gelu_tanh"),
    "silu": (nn.SiLU, "silu"),
    "transformers-gelu": (GELUActivation, "gelu"),
    "transformers-gelu-tanh": (GELUTanh, "gelu_tanh"),
    "transformers-new-gelu": (NewGELUActivation, "new_gelu"),
    "transformers-silu": (SiLUActivation, "silu"),
    "transformers-quick-gelu": (QuickGELUActivation, "quick_gelu"),
}
VALUES = ("invert", "precision_bit")


@pytest.fixture(params=VALUES)
def value(request):
    return request.param


def approximate(kind, value):
    return swapped(KINDS[kind][0](), "activation", value)


def planted(monkeypatch):
    """Slopes that are wrong by 1%."""
    monkeypatch.setattr("hf_memsave.ops.approximate.inverted.slope", lambda *args: PLANTED * slope(*args))


@pytest.mark.parametrize("kind", KINDS)
def test_inverted_knows_its_modules(kind, value):
    build, name = KINDS[kind]
    assert name_of(build()) == required_name(build()) == name
    assert ACTIVATION.check(build(), value) == ""


@pytest.mark.parametrize(("kind", "value", "dtype"), pairwise(KINDS, VALUES, DTYPES))
def test_inverted_forward_is_stocks_and_backward_the_slope_of_the_output(device, kind, value, dtype):
    """``precision_bit`` changes one unit in the last place at most; and the slope is near the true one."""
    x = torch.cat([random(500, dtype=dtype, device=device) * 8, torch.tensor([1e9, -1e9, 0.0, -0.0]).to(device, dtype)])
    op, (build, name) = approximate(kind, value), KINDS[kind]
    got, stock = run(op, [x], tape=True), run(build(), [x])
    if value == "invert":
        assert_same_bits(got.output, stock.output)
        assert_same_bits(got.of_consumer, stock.of_consumer)
    else:
        assert (bits(got.output).long() - bits(stock.output).long()).abs().max() == 1
    x = (random(500, dtype=dtype, device=device) * 4).requires_grad_()
    with taping():
        y = op(x)
    dy = random(500, dtype=dtype, device=device, seed=3)
    y.backward(dy)
    fit, y = FITS[name], y.detach()
    middle, ulp = (wide(y), fit.ulp(dtype)) if value == "invert" else (decode(y)[0], 2 * fit.ulp(dtype))
    assert_same_bits(x.grad, (dy * slope(middle, x < fit.turn, fit, ulp)).to(dtype))
    assert_slope_is_near(device, kind, value, dtype)


def assert_slope_is_near(device, kind, value, dtype):
    """Of what was drawn; every half there is, is in ``test_inverse``."""
    x = (random(500, dtype=dtype, device=device) * 4).requires_grad_()
    true = x.detach().double().requires_grad_()
    with taping():
        y = approximate(kind, value)(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(ACTIVATIONS[KINDS[kind][1]](true).sum(), true)
    rounding = torch.finfo(dtype).eps
    assert_errs_by_slope(dx, expected, torch.ones_like(expected), 1.5 * SLOPE[dtype], rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_inverted_slope_that_is_wrong_is_caught(device, value, dtype, monkeypatch):
    planted(monkeypatch)
    with pytest.raises(AssertionError, match="too far"):
        assert_slope_is_near(device, "gelu", value, dtype)


@pytest.mark.parametrize(
    ("kind", "value", "dtype", "shape"), pairwise(KINDS, VALUES, DTYPES, [(3, 5, 8), (7,), (), (0, 4), (2, 0, 4)])
)
def test_inverted_keeps_its_output_and_bits(device, kind, value, dtype, shape):
    x = random(*shape, dtype=dtype, device=device)
    of_bits = -(-x.numel() // 8) if value == "invert" else 0
    assert kept(approximate(kind, value), x, tape=True, linear=bool(shape)) == nbytes(x) + of_bits
    if shape == (3, 5, 8) and kind not in ("transformers-new-gelu", "transformers-quick-gelu"):
        assert kept(KINDS[kind][0](), x, tape=False) == 2 * nbytes(x)


@pytest.mark.parametrize("view", LAYOUTS)
def test_inverted_takes_views_and_a_wrong_slope_is_caught_there(device, value, view, monkeypatch):
    x, module = random(4, 5, 8, device=device), approximate("gelu", value)

    def check():
        got = run(lambda x: module(LAYOUTS[view](x)), [x], tape=True)
        stock = run(lambda x: F.gelu(LAYOUTS[view](x)), [x])
        assert layout(got.output) == layout(stock.output)
        leaf = x.double().requires_grad_()
        seen = LAYOUTS[view](leaf)
        (size,) = torch.autograd.grad(seen, leaf, incoming(seen).abs())  # of what meets in an element, the sum
        assert_errs_by_slope(got.of_inputs[0], stock.of_inputs[0].double(), size, SLOPE[x.dtype], 1e-5)

    check()
    planted(monkeypatch)
    with pytest.raises(AssertionError, match="too far"):
        check()


def incoming(y):
    """What ``run`` hands an op that made ``y``."""
    return (random(*y.shape, device=y.device, seed=1) * random(*y.shape, device=y.device, seed=2)).double()


def test_inverted_runs_backward_twice_but_not_double_nor_after_a_write(device, value):
    op, x = approximate("silu", value), random(3, 8, device=device)
    assert_backward_twice(op, x)
    x.requires_grad_()
    with taping():
        (dx,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
    with taping():
        y = op(x)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(KeptTensorChangedError):
        y.sum().backward()


def test_inverted_under_checkpointing(device, value):
    op = approximate("silu", value)

    def block(x):
        with taping():
            return op(x).square()

    x = random(3, 8, device=device)
    assert_same_result(run(lambda x: checkpoint(block, x, use_reentrant=False), [x]), run(block, [x]))


@pytest.mark.parametrize("kind", ["gelu", "transformers-new-gelu"])
def test_inverted_under_autocast(device, kind, value):
    x = random(3, 8, dtype=torch.bfloat16, device=device)
    got = run(approximate(kind, value), [x], tape=True, autocast=torch.bfloat16)
    stock = run(KINDS[kind][0](), [x], autocast=torch.bfloat16)
    assert got.output.dtype == stock.output.dtype
    if value == "invert":
        assert_same_bits(got.output, stock.output)
    size = (incoming(x).abs() * 1.02).clamp_min(1e-3)  # of factors and products that are rounded to bf16
    largest = 1.5 * SLOPE[torch.bfloat16]
    assert_errs_by_slope(got.of_inputs[0], stock.of_inputs[0].double(), size, largest, 0.01 * size)
    with autocasting(device, torch.bfloat16):
        assert inverted(random(3, device=device).requires_grad_(), "gelu", F.gelu).dtype == torch.float32


def test_inverted_is_stock_without_a_gradient(device, value):
    x = random(300, device=device)
    assert_same_bits(approximate("gelu", value)(x), F.gelu(x))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.SiLU(inplace=True), "inplace=True"),
        (GELUActivation(use_gelu_python=True), "expected torch's own gelu"),
        (GELUTanh(use_gelu_tanh_python=True), "expected torch's own gelu"),
    ],
    ids=repr,
)
def test_an_activation_that_is_another_function_is_refused(module, reason, value):
    assert reason in ACTIVATION.check(module, value)


def test_inverted_refuses_what_has_no_fit(device):
    for ask in (lambda: required_name(MishActivation()), lambda: fit_of("mish")):
        with pytest.raises(PatchError, match=r"[mM]ish.*has no fit: expected one of gelu, .*fit_inverse.py"):
            ask()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_precision_bit_survives_every_kind_of_number(device, dtype):
    info = torch.finfo(dtype)
    y = torch.tensor([0.0, -0.0, float("inf"), info.max, info.tiny, 1.0], dtype=dtype, device=device)
    middle, m = decode(encode(y, y.isnan()))
    assert not m.any()
    assert_same_bits(middle[2], torch.tensor(float("inf"), dtype=middle.dtype, device=device))
    low = torch.tensor([-0.0, -info.tiny, -0.125], dtype=dtype, device=device)
    middle, m = decode(encode(low, low == low))
    assert m.all()
    assert ((middle - low).abs() <= info.eps * low.abs() + info.tiny * info.eps).all()
    assert decode(encode(torch.full((2,), float("nan"), dtype=dtype), low[:2].cpu() > 0))[0].isnan().all()
