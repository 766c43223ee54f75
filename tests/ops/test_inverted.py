"""``inverted`` and ``precision_bit``: stock's forward, the slope of the output, and the output is all that is kept."""

import copy
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
from hf_memsave.ops.activation import ACTIVATION
from hf_memsave.ops.elementwise import ACTIVATIONS, name_of, required_name
from hf_memsave.ops.inverse import FITS, slope, wide
from hf_memsave.ops.inverted import Recipe, fit_of, from_output, inverted, kept_bytes
from hf_memsave.ops.precision_bit import decode, encode
from hf_memsave.ops.precision_bit import kept_bytes as precision_bit_kept_bytes
from support.helpers import (
    DTYPES,
    LAYOUTS,
    assert_backward_twice,
    assert_gradients_are_right,
    assert_same_bits,
    assert_same_result,
    autocasting,
    bits,
    kept,
    layout,
    only_on_cpu,
    random,
    run,
    swapped,
    taping,
)
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
VALUES = {"invert": kept_bytes, "precision_bit": precision_bit_kept_bytes}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(params=VALUES)
def value(request):
    return request.param


@pytest.fixture
def module(kind):
    return KINDS[kind][0]()


@pytest.fixture
def name(kind):
    return KINDS[kind][1]


@pytest.fixture
def op(module, value):
    return approximate(module, value)


def approximate(module, value):
    return swapped(copy.deepcopy(module), "activation", value)


def test_inverted_knows_its_modules(module, name):
    assert name_of(module) == required_name(module) == name


@pytest.mark.parametrize("value", ["invert"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inverted_forward_is_stocks(device, module, op, dtype):
    x = torch.cat([random(500, dtype=dtype, device=device) * 8, torch.tensor([1e9, -1e9, 0.0, -0.0]).to(device, dtype)])
    got, stock = run(op, [x], tape=True), run(module, [x])
    assert_same_bits(got.output, stock.output)
    assert_same_bits(got.of_consumer, stock.of_consumer)


@pytest.mark.parametrize("value", ["precision_bit"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_precision_bit_changes_one_unit_in_the_last_place_at_most(device, module, op, dtype):
    x = random(500, dtype=dtype, device=device) * 8
    got, stock = run(op, [x], tape=True).output, module(x)
    assert (bits(got).long() - bits(stock).long()).abs().max() == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inverted_backward_is_the_slope_of_the_output(device, op, name, value, dtype):
    x = (random(500, dtype=dtype, device=device) * 4).requires_grad_()
    with taping():
        y = op(x)
    dy = random(500, dtype=dtype, device=device, seed=3)
    y.backward(dy)
    fit, ulp = FITS[name], FITS[name].ulp(dtype)
    if value == "invert":
        expected = slope(wide(y.detach()), x < fit.turn, fit, ulp)
    else:
        expected = slope(decode(y.detach())[0], x < fit.turn, fit, 2 * ulp)
    assert_same_bits(x.grad, (dy * expected).to(dtype))


@pytest.mark.parametrize("shape", [(3, 5, 8), (7,), (), (0, 4), (2, 0, 4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inverted_keeps_what_it_claims(device, op, value, dtype, shape):
    x = random(*shape, dtype=dtype, device=device)
    claim = VALUES[value](shape, x.itemsize)
    assert kept(op, x, tape=True, linear=bool(shape)) == claim.here


@pytest.mark.parametrize("kind", ["gelu", "transformers-silu"])
def test_stock_keeps_what_is_claimed_for_it(device, module, value):
    x = random(3, 5, 8, device=device)
    assert kept(module, x, tape=False) == VALUES[value](tuple(x.shape), x.itemsize).eager


@pytest.mark.parametrize("kind", ["gelu"])
@pytest.mark.parametrize("view", LAYOUTS)
def test_inverted_takes_views(device, module, op, view):
    x = random(4, 5, 8, device=device)
    got = run(lambda x: op(LAYOUTS[view](x)), [x], tape=True)
    stock = run(lambda x: module(LAYOUTS[view](x)), [x])
    assert layout(got.output) == layout(stock.output)
    leaf = x.double().requires_grad_()
    seen = LAYOUTS[view](leaf)
    (size,) = torch.autograd.grad(seen, leaf, incoming(seen).abs())  # of what meets in an element, the sum
    assert_errs_by_slope(got.of_inputs[0], stock.of_inputs[0].double(), size, SLOPE[x.dtype], 1e-5)


def incoming(y):
    """What ``run`` hands an op that made ``y``."""
    return (random(*y.shape, device=y.device, seed=1) * random(*y.shape, device=y.device, seed=2)).double()


@pytest.mark.parametrize("kind", ["gelu"])
@pytest.mark.parametrize("view", LAYOUTS)
def test_inverted_with_a_wrong_slope_is_caught(device, module, op, value, view, monkeypatch):
    file = "inverted" if value == "invert" else value
    monkeypatch.setattr(f"hf_memsave.ops.{file}.slope", lambda *args: PLANTED * slope(*args))
    with pytest.raises(AssertionError, match="too far"):
        test_inverted_takes_views(device, module, op, view)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inverted_slope_is_near_the_true_one(device, module, op, name, dtype):
    """Of what was drawn; every half there is, is in ``test_inverse``."""
    x = (random(500, dtype=dtype, device=device) * 4).requires_grad_()
    true = x.detach().double().requires_grad_()
    (dx,) = torch.autograd.grad(op_under_tape(op, x).sum(), x)
    (expected,) = torch.autograd.grad(ACTIVATIONS[name].forward(true).sum(), true)
    rounding = torch.finfo(dtype).eps
    assert_errs_by_slope(dx, expected, torch.ones_like(expected), 1.5 * SLOPE[dtype], rounding)


def op_under_tape(op, x):
    with taping():
        return op(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_inverted_slope_that_is_wrong_is_caught(device, module, op, name, value, dtype, monkeypatch):
    file = "inverted" if value == "invert" else value
    monkeypatch.setattr(f"hf_memsave.ops.{file}.slope", lambda *args: PLANTED * slope(*args))
    with pytest.raises(AssertionError, match="too far"):
        test_inverted_slope_is_near_the_true_one(device, module, op, name, dtype)


@pytest.mark.parametrize("kind", ["silu"])
def test_inverted_runs_backward_twice(device, op):
    assert_backward_twice(op, random(3, 8, device=device))


@pytest.mark.parametrize("kind", ["silu"])
def test_inverted_refuses_double_backward(device, op):
    x = random(3, 8, device=device).requires_grad_()
    with taping():
        (dx,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("kind", ["silu"])
def test_inverted_raises_where_its_output_was_written_to(device, op):
    x = random(3, 8, device=device).requires_grad_()
    with taping():
        y = op(x)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(KeptTensorChangedError):
        y.sum().backward()


@pytest.mark.parametrize("kind", ["silu"])
def test_inverted_under_checkpointing(device, op):
    def block(x):
        with taping():
            return op(x).square()

    x = random(3, 8, device=device)
    assert_same_result(run(lambda x: checkpoint(block, x, use_reentrant=False), [x]), run(block, [x]))


@pytest.mark.parametrize("kind", ["gelu", "transformers-new-gelu"])
def test_inverted_under_autocast(device, module, op, value):
    x = random(3, 8, dtype=torch.bfloat16, device=device)
    got = run(op, [x], tape=True, autocast=torch.bfloat16)
    stock = run(module, [x], autocast=torch.bfloat16)
    assert got.output.dtype == stock.output.dtype
    if value == "invert":
        assert_same_bits(got.output, stock.output)
    size = (incoming(x).abs() * 1.02).clamp_min(1e-3)  # of factors and products that are rounded to bf16
    largest = 1.5 * SLOPE[torch.bfloat16]
    assert_errs_by_slope(got.of_inputs[0], stock.of_inputs[0].double(), size, largest, 0.01 * size)


@pytest.mark.parametrize("kind", ["gelu"])
def test_inverted_is_stock_without_a_gradient(device, module, op):
    only_on_cpu(device)
    x = random(300, device=device)
    assert_same_bits(op(x), module(x))


@pytest.mark.parametrize("kind", KINDS)
def test_every_activation_with_a_fit_can_be_approximated(module, value):
    assert ACTIVATION.check(module, value) == ""


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


def test_autocast_stays_as_it_was(device):
    with autocasting(device, torch.bfloat16):
        assert inverted(random(3, device=device).requires_grad_(), "gelu", F.gelu).dtype == torch.float32


# Tempo's recipe for any elementwise function


def test_from_output_needs_no_indicator_where_f_has_an_inverse(device):
    def tanh(x):
        return from_output(torch.tanh, Recipe(lambda dy, y, m: (dy * (1 - y * y),)), x)

    assert_gradients_are_right(tanh, random(3, 4, dtype=torch.float64, device=device), twice=False)
    x = random(3, 8, device=device)
    assert kept(tanh, x, tape=True) == x.nbytes


def test_from_output_takes_further_inputs(device):
    def gradients(dy, y, m, b):
        dx = dy * torch.where(m, -1, 1) * 2 * (y - b).sqrt()
        return dx, dy

    def square_plus(x, b):
        return from_output(lambda x, b: x * x + b, Recipe(gradients, lambda x: x < 0), x, b)

    values = [random(3, 4, dtype=torch.float64, device=device, seed=s) for s in (0, 1)]
    assert_gradients_are_right(square_plus, *values, twice=False)
