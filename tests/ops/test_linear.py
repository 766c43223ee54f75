"""``linear``: under autocast, the bits of ``nn.Linear`` and ``Conv1D`` without half copies of x and the weight."""

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_memsave.ops.expression import match
from hf_memsave.ops.linear import CONV1D, kept_bytes
from support.helpers import (
    DTYPES,
    as_function,
    assert_backward_twice,
    assert_exact,
    assert_gradients_are_right,
    assert_same_result,
    kept,
    only_on_cpu,
    random,
    run,
    subsets,
    swapped,
)

ROWS, IN, OUT = 15, 8, 4
KINDS = {"linear": lambda: nn.Linear(IN, OUT), "conv1d": lambda: Conv1D(OUT, IN)}
LOW = [torch.bfloat16, torch.float16]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def stock(kind, device):
    module = KINDS[kind]().to(device)
    nn.init.normal_(module.bias)  # Conv1D's is zero
    return module


@pytest.fixture
def ours(kind, stock):
    return swapped(copy.deepcopy(stock), kind)


def inputs(module, device, shape=(3, 5, IN), dtype=torch.float32):
    return [random(*shape, dtype=dtype, device=device), *module.parameters()]


@pytest.mark.parametrize("wanted", subsets(3), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_is_exact_under_autocast(device, stock, ours, dtype, wanted):
    only_on_cpu(device)
    given = inputs(stock, device, dtype=dtype)
    assert_exact(as_function(ours), as_function(stock), given, wanted=wanted, autocast=torch.bfloat16)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", LOW, ids=str)
def test_linear_is_exact_under_autocast_for_half_weights(device, stock, ours, weight_dtype, autocast):
    only_on_cpu(device)
    given = inputs(stock.to(weight_dtype), device)
    assert_exact(as_function(ours), as_function(stock), given, autocast=autocast)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_is_exact_without_autocast(device, stock, ours, dtype):
    only_on_cpu(device)
    assert_exact(as_function(ours), as_function(stock), inputs(stock.to(dtype), device, dtype=dtype))


@pytest.mark.parametrize("shape", [(IN,), (1, IN), (0, IN), (2, 1, 3, IN)], ids=str)
def test_linear_is_exact_for_odd_shapes(device, stock, ours, shape):
    only_on_cpu(device)
    assert_exact(as_function(ours), as_function(stock), inputs(stock, device, shape), autocast=torch.bfloat16)


@pytest.mark.parametrize("view", [lambda x: x[..., ::2], lambda x: x[1:, :, IN:]], ids=["sliced", "offset"])
def test_linear_is_exact_for_views(device, view):
    only_on_cpu(device)
    stock = nn.Linear(IN, OUT, device=device)
    ours = as_function(swapped(copy.deepcopy(stock), "linear"))
    given = [random(3, 5, 2 * IN, device=device), *stock.parameters()]
    reference = as_function(stock)
    assert_exact(lambda x, *p: ours(view(x), *p), lambda x, *p: reference(view(x), *p), given, autocast=torch.bfloat16)


def test_linear_without_bias_is_exact(device):
    only_on_cpu(device)
    stock = nn.Linear(IN, OUT, bias=False, device=device)
    ours = swapped(copy.deepcopy(stock), "linear")
    assert_exact(as_function(ours), as_function(stock), inputs(stock, device), autocast=torch.bfloat16)


def test_linears_of_one_input_are_exact(device):
    # q, k and v: their gradients are added in x's dtype, not in autocast's.
    only_on_cpu(device)
    stock = [nn.Linear(IN, OUT, bias=False, device=device) for _ in range(3)]
    ours = [swapped(copy.deepcopy(module), "linear") for module in stock]

    def total(modules):
        return lambda x, *w: sum(as_function(m)(x, p) for m, p in zip(modules, w, strict=True))

    given = [random(3, 5, IN, device=device), *(m.weight for m in stock)]
    assert_exact(total(ours), total(stock), given, autocast=torch.bfloat16)


def test_a_linear_called_twice_is_no_worse_than_stock(device):
    # Stock adds the two gradients of its weight in half precision, and so with an error that ours has not.
    stock = nn.Linear(64, 64, bias=False, device=device)
    ours = swapped(copy.deepcopy(stock), "linear")
    given = [random(7, 64, device=device), stock.weight]

    def twice(module):
        call = as_function(module)
        return lambda x, w: call(call(x, w).to(x.dtype), w)

    truth = run(twice(stock), [t.double() for t in given]).of_inputs[1]

    def worst(result):
        return (result.of_inputs[1].double() - truth).abs().max()

    errors = [
        worst(run(twice(module), given, tape=tape, autocast=torch.bfloat16))
        for module, tape in ((ours, True), (stock, False))
    ]
    assert errors[0] <= errors[1]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_linear_has_the_right_gradients(device, stock, ours, autocast):
    # Autocast leaves float64 alone.
    call = as_function(ours)

    def under_autocast(x, *parameters):
        if autocast is None:
            return call(x, *parameters)
        with torch.autocast(device.type, dtype=autocast):
            return call(x, *parameters)

    given = inputs(stock.double(), device, (2, IN), torch.float64)
    assert_gradients_are_right(under_autocast, *given)


def test_linear_runs_backward_twice(device, stock, ours):
    call = as_function(ours)

    def under_autocast(x, *parameters):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return call(x, *parameters)

    assert_backward_twice(under_autocast, *inputs(stock, device))


@pytest.mark.parametrize("autocast", LOW, ids=str)
def test_linear_keeps_what_it_claims(device, stock, ours, autocast):
    x = random(3, 5, IN, device=device)
    claim = kept_bytes(ROWS, IN, OUT, autocast.itemsize)
    options = dict(producer=torch.sigmoid, linear=False, autocast=autocast)
    input_itself = x.nbytes  # kept for another reason, by the sigmoid that makes it
    assert kept(stock, x, tape=False, **options) == input_itself + claim.eager
    assert kept(ours, x, tape=True, **options) == input_itself + claim.here


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_linear_needs_no_tape_around_it(device, stock, ours, autocast):
    given = inputs(stock, device)
    mine, reference = (run(as_function(module), given, autocast=autocast) for module in (ours, stock))
    assert_same_result(mine, reference)
    keeps, stock_keeps = (kept(m, given[0], tape=False, autocast=autocast, linear=False) for m in (ours, stock))
    assert stock_keeps - keeps == (kept_bytes(0, IN, OUT, 2).eager if autocast else 0)  # the weight's cast


def test_conv1d_is_known_by_its_source():
    assert match(Conv1D.forward, CONV1D.expressions) == {name: name for name in ("nf", "bias", "weight")}
