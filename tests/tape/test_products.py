"""Matrix products under autocast: stock's bits without half copies of inputs and weights; and conversions by hand."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from hf_memsave import measure_kept
from support.helpers import (
    DTYPES,
    LAYOUTS,
    as_function,
    assert_backward_twice,
    assert_exact,
    assert_gradients_are_right,
    assert_same_bits,
    autocasting,
    kept,
    only_on_cpu,
    random,
    subsets,
    taping,
)

ROWS, IN, OUT = 15, 8, 4
KINDS = {"linear": lambda: nn.Linear(IN, OUT), "conv1d": lambda: Conv1D(OUT, IN)}
LOW = [torch.bfloat16, torch.float16]


@pytest.fixture(params=KINDS)
def module(request, device):
    module = KINDS[request.param]().to(device)
    nn.init.normal_(module.bias)  # Conv1D's is zero
    return module


def inputs(module, device, shape=(3, 5, IN), dtype=torch.float32):
    return [random(*shape, dtype=dtype, device=device), *module.parameters()]


def assert_is_stocks(fn, given, **options):
    only_on_cpu(given[0].device)
    assert_exact(fn, fn, given, **options)


@pytest.mark.parametrize("wanted", subsets(3), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_linear_is_exact_under_autocast(device, module, dtype, wanted):
    given = inputs(module, device, dtype=dtype)
    assert_is_stocks(as_function(module), given, wanted=wanted, autocast=torch.bfloat16)


@pytest.mark.parametrize("weight_dtype", LOW, ids=str)
@pytest.mark.parametrize("autocast", LOW, ids=str)
def test_a_linear_is_exact_under_autocast_for_half_weights(device, module, weight_dtype, autocast):
    assert_is_stocks(as_function(module), inputs(module.to(weight_dtype), device), autocast=autocast)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_linear_is_exact_without_autocast(device, module, dtype):
    assert_is_stocks(as_function(module), inputs(module.to(dtype), device, dtype=dtype))


@pytest.mark.parametrize("shape", [(IN,), (1, IN), (0, IN), (2, 1, 3, IN)], ids=str)
def test_a_linear_is_exact_for_odd_shapes(device, module, shape):
    assert_is_stocks(as_function(module), inputs(module, device, shape), autocast=torch.bfloat16)


@pytest.mark.parametrize("view", [lambda x: x[..., ::2], lambda x: x[1:, :, IN:]], ids=["sliced", "offset"])
def test_a_linear_is_exact_for_views(device, view):
    call = as_function(nn.Linear(IN, OUT, bias=False, device=device))
    given = [random(3, 5, 2 * IN, device=device), random(OUT, IN, device=device, seed=3)]
    assert_is_stocks(lambda x, w: call(view(x), w), given, autocast=torch.bfloat16)


def test_linears_of_one_input_are_exact(device):
    # q, k and v: their gradients are added in x's dtype, not in autocast's.
    def total(x, *weights):
        return sum(F.linear(x, weight) for weight in weights)

    weights = [random(OUT, IN, device=device, seed=s) for s in range(3)]
    assert_is_stocks(total, [random(3, 5, IN, device=device), *weights], autocast=torch.bfloat16)


@pytest.mark.parametrize("is_cached", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("times", [2, 3])
def test_a_linear_called_again_has_stocks_bits(device, times, is_cached):
    """As stock does, with one cast of the weight for all calls: their gradients are added in half precision."""

    def again(x, weight, bias):
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=is_cached):
            for _ in range(times):
                x = F.linear(x, weight, bias).float().sin()
            return x @ weight + x.mT.mT @ weight

    given = [random(7, 64, device=device), random(64, 64, device=device, seed=1), random(64, device=device, seed=2)]
    assert_is_stocks(again, given)


def test_a_weight_changed_between_two_calls_is_converted_anew(device):
    def changed(x, w):
        first = F.linear(x, w)
        with torch.no_grad():
            w.mul_(2)
        return first + F.linear(x, w)

    only_on_cpu(device)
    x, w = random(7, 64, device=device), random(64, 64, device=device, seed=1).requires_grad_()
    found = []
    for tape in (taping(), contextlib.nullcontext()):
        weight = w.detach().clone().requires_grad_()
        with autocasting(device, torch.bfloat16), tape:
            found.append(changed(x, weight))
    assert_same_bits(*found)


#: Other spellings of a product, of x [7, 64], a weight [64, 64] and a bias [64].
PRODUCTS = {
    "torch.matmul": lambda x, w, b: torch.matmul(x, w),
    "Tensor.matmul": lambda x, w, b: x.matmul(w),
    "@": lambda x, w, b: x @ w,
    "w @ x": lambda x, w, b: w @ x.mT,
    "mm": lambda x, w, b: torch.mm(x, w) + x.mm(w),
    "bmm": lambda x, w, b: torch.bmm(x[None], w[None]) + x[None].bmm(w[None]),
    "addmm": lambda x, w, b: torch.addmm(b, x, w) + b.addmm(x, w),
    "addmm with factors": lambda x, w, b: torch.addmm(b, x, w, beta=0.5, alpha=2.0),
    "baddbmm": lambda x, w, b: torch.baddbmm(b, x[None], w[None]) + b.expand(1, 7, 64).baddbmm(x[None], w[None]),
    "addbmm": lambda x, w, b: torch.addbmm(b, x[None], w[None]) + b.expand(7, 64).addbmm(x[None], w[None]),
    "einsum": lambda x, w, b: torch.einsum("nd,de->ne", x, w),
    "by name": lambda x, w, b: F.linear(x, weight=w, bias=b) + torch.matmul(input=x, other=w),
    "linear without bias": lambda x, w, b: F.linear(x, w, None) + F.linear(x, w, bias=b),
}


@pytest.mark.parametrize("autocast", [None, *LOW], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_exact_and_keeps_no_more_than_stock(device, name, autocast):
    fn = PRODUCTS[name]
    given = [random(7, 64, device=device), random(64, 64, device=device, seed=1), random(64, device=device, seed=2)]
    if name != "w @ x":
        assert_is_stocks(fn, given, autocast=autocast)
    weight, bias = (nn.Parameter(t) for t in given[1:])
    found = [kept(lambda x: fn(x, weight, bias), given[0], tape, linear=False, autocast=autocast) for tape in (0, 1)]
    assert found[1] <= found[0]


@pytest.mark.parametrize("autocast", LOW, ids=str)
def test_a_linear_under_autocast_keeps_nothing_beside_its_input(device, module, autocast):
    x = random(3, 5, IN, device=device)
    options = dict(producer=torch.sigmoid, linear=False, autocast=autocast)
    copies = (ROWS * IN + IN * OUT) * autocast.itemsize
    assert kept(module, x, tape=False, **options) == x.nbytes + copies
    assert kept(module, x, tape=True, **options) == x.nbytes


def test_a_linear_of_float64_is_left_alone_by_autocast(device, module):
    assert_is_stocks(as_function(module), inputs(module.double(), device, dtype=torch.float64), autocast=torch.bfloat16)


def test_a_product_where_autocast_is_switched_off(device):
    def off(x, w):
        y = F.linear(x, w)
        with torch.autocast(device.type, enabled=False):
            return F.linear(y.float(), w)

    given = [random(7, 64, device=device), random(64, 64, device=device, seed=1)]
    assert_is_stocks(off, given, autocast=torch.bfloat16)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_a_linear_has_the_right_gradients(device, module, autocast):
    call = as_function(module.double())  # autocast leaves float64 alone

    def under_autocast(x, *parameters):
        with autocasting(device, autocast):
            return call(x, *parameters)

    assert_gradients_are_right(under_autocast, *inputs(module, device, (2, IN), torch.float64))


def test_a_linear_runs_backward_twice(device, module):
    call = as_function(module)

    def under_autocast(x, *parameters):
        with autocasting(device, torch.bfloat16):
            return call(x, *parameters)

    assert_backward_twice(under_autocast, *inputs(module, device))


# Adapters.


class DoRA(nn.Module):
    """The norm of W + B A by columns, which scales the output."""

    def __init__(self, rank=4, width=64):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a, self.b = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        self.magnitude = nn.Parameter(torch.ones(width))

    def forward(self, x):
        delta = self.b(self.a(torch.eye(64, device=x.device))).T
        scale = self.magnitude / torch.linalg.norm(self.base.weight + delta, dim=1).detach()
        return (scale - 1) * self.base(x) + scale * self.b(self.a(x))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_the_wide_product_of_an_adapter_is_remade_and_has_stocks_bits(device, autocast):
    model, x = DoRA().to(device), random(32, 64, device=device)
    assert_is_stocks(as_function(model), [x, *model.parameters()], autocast=autocast)
    stock, here = (kept(model, x, tape, linear=False, autocast=autocast) for tape in (False, True))
    wide = x.nbytes if autocast is None else x.nbytes // 2
    assert stock - here >= wide, "the output of B is kept"


# Conversions.


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("to", DTYPES, ids=lambda dtype: f"to-{dtype}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_conversion_is_exact(device, dtype, to, wanted):
    assert_is_stocks(lambda x: x.to(to), [random(3, 8, dtype=dtype, device=device)], wanted=[wanted])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_conversion_and_back_is_exact_for_views(device, layout):
    view = LAYOUTS[layout]
    assert_is_stocks(lambda x: view(x).bfloat16().float(), [random(4, 5, 8, device=device)])


def test_conversions_of_one_tensor_add_their_gradients_in_its_dtype(device):
    weights = [random(64, dtype=torch.bfloat16, device=device, seed=s) for s in range(3)]
    assert_is_stocks(lambda x: sum(x.bfloat16() * w for w in weights), [random(64, device=device)])


def test_a_conversion_has_the_right_gradients(device):
    # There and back through complex128: finite differences need more than float32, and a conversion that is one.
    x = random(2, 3, dtype=torch.float64, device=device)
    assert_gradients_are_right(lambda x: x.to(torch.complex128).real, x)


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_conversion_keeps_nothing_where_its_input_is_kept(device, to):
    x = random(3, 5, 8, device=device)
    options = dict(producer=torch.sigmoid)
    assert kept(lambda x: x.to(to), x, tape=False, **options) == x.nbytes + x.numel() * to.itemsize
    assert kept(lambda x: x.to(to), x, tape=True, **options) == x.nbytes


def test_a_cast_of_a_weight_is_made_once_in_a_forward_and_kept_by_nobody(device):
    """A tied or shared layer, as in ALBERT."""
    only_on_cpu(device)
    layer = nn.Linear(64, 64).to(device)

    class Shared(nn.Module):
        def __init__(self, tape):
            super().__init__()
            self.layer, self.tape = copy.deepcopy(layer), tape

        def forward(self, x):
            with taping() if self.tape else contextlib.nullcontext(), autocasting(x.device, torch.bfloat16):
                for _ in range(4):
                    x = self.layer(x).float().relu()
                return {"loss": x.sum()}

    x = random(16, 64, device=device)
    stock, here = (measure_kept(Shared(tape).to(device), x) for tape in (False, True))
    low = layer.weight.numel() * 2
    assert low in [s.nbytes for s in stock.storages]
    assert low not in [s.nbytes for s in here.storages]


class Conversions(TorchDispatchMode):
    """Counts those of a tensor of ``shape`` to bf16."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16 and out.shape == self.shape:
            self.count += 1
        return out


def inputs_of_several(device, rows, number):
    return [random(rows, IN, device=device), *(random(OUT, IN, device=device, seed=s) for s in range(1, number + 1))]


@pytest.mark.parametrize("between", [lambda h: h, lambda h: h.mul_(2)], ids=["nothing", "a write"])
def test_backward_converts_once_what_several_products_took(device, between):
    only_on_cpu(device)

    def branches(x, q, k, v):
        h = torch.tanh(x) * 3  # the second of two functions that are remade from x
        first = F.linear(h, q)
        h = between(h)
        return first + F.linear(h, k) + F.linear(h, v)

    given = inputs_of_several(device, ROWS, 3)
    assert_is_stocks(branches, given, autocast=torch.bfloat16)
    with taping(), autocasting(device, torch.bfloat16):
        loss = branches(*(t.requires_grad_() for t in given)).sum()
    with Conversions(given[0].shape) as seen:
        loss.backward()
    assert seen.count == 1  # what was converted before a write has been kept


def test_conversions_of_other_parts_of_a_storage_stay_apart(device):
    def branches(x, *weights):
        h = torch.tanh(x) * 3
        parts = *h.chunk(2), h.view(2, ROWS, IN)[0], torch._neg_view(h[:ROWS])
        return sum(F.linear(part, weight) for weight, part in zip(weights, parts, strict=True))

    assert_is_stocks(branches, inputs_of_several(device, 2 * ROWS, 4), autocast=torch.bfloat16)
