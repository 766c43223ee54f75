"""``new_gelu`` and ``quick_gelu``: the bits of Transformers' expressions, and only their input is kept."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers.activations import FastGELUActivation, NewGELUActivation, QuickGELUActivation, SiLUActivation

from hf_memsave.ops import new_gelu, quick_gelu
from hf_memsave.ops.expression import match
from hf_memsave.ops.op import Op
from support.helpers import (
    DTYPES,
    LAYOUTS,
    assert_backward_twice,
    assert_exact,
    assert_gradients_are_right,
    assert_no_worse_than_eager,
    assert_same_bits,
    assert_same_result,
    kept,
    only_on_cpu,
    random,
    run,
    swapped,
)


class Case(NamedTuple):
    """An op, its reference, what it claims to keep, the module it replaces, and one that it does not."""

    op: Op
    fn: Callable[[torch.Tensor], torch.Tensor]
    reference: Callable[[torch.Tensor], torch.Tensor]
    kept_bytes: Callable[..., Any]
    factors: int  # numbers in the expression, which autograd keeps as float64 tensors
    module: type[nn.Module]
    other: type[nn.Module]


CASES = {
    "new_gelu": Case(
        new_gelu.NEW_GELU, new_gelu.new_gelu, new_gelu.new_gelu_reference, new_gelu.kept_bytes, 3, NewGELUActivation,
        FastGELUActivation,
    ),
    "quick_gelu": Case(
        quick_gelu.QUICK_GELU, quick_gelu.quick_gelu, quick_gelu.quick_gelu_reference, quick_gelu.kept_bytes, 1,
        QuickGELUActivation, SiLUActivation,
    ),
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_is_stock(device, case, dtype):
    x = random(3, 8, dtype=dtype, device=device)
    assert_same_bits(case.reference(x), case.module()(x))


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_exact(device, case, dtype, wanted):
    only_on_cpu(device)
    assert_exact(case.fn, case.reference, [random(7, 5, 9, dtype=dtype, device=device)], wanted=[wanted])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_is_exact_under_autocast(device, case, dtype):
    only_on_cpu(device)
    x = random(3, 8, dtype=dtype, device=device)
    assert_exact(case.fn, case.reference, [x], autocast=torch.bfloat16)


@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (2, 0, 4), (2, 1, 7)], ids=str)
def test_is_exact_for_odd_shapes(device, case, shape):
    only_on_cpu(device)
    assert_exact(case.fn, case.reference, [random(*shape, device=device)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_is_exact_for_views(device, case, layout, dtype):
    only_on_cpu(device)
    view = LAYOUTS[layout]
    x = random(4, 5, 8, dtype=dtype, device=device)
    assert_exact(lambda x: case.fn(view(x)), lambda x: case.reference(view(x)), [x])


def test_is_exact_for_numbers_that_are_not_finite(device, case):
    only_on_cpu(device)
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 1e38, -1e38, -0.0], device=device)
    assert_exact(case.fn, case.reference, [x])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_is_no_worse_than_eager(device, case, dtype):
    assert_no_worse_than_eager(case.fn, case.reference, [random(3, 8, dtype=dtype, device=device)])


def test_has_the_right_gradients(device, case):
    assert_gradients_are_right(case.fn, random(2, 3, dtype=torch.float64, device=device))


def test_runs_backward_twice(device, case):
    assert_backward_twice(case.fn, random(3, 8, device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keeps_what_it_claims(device, case, dtype):
    x = random(3, 5, 8, dtype=dtype, device=device)
    claim = case.kept_bytes(tuple(x.shape), x.itemsize)
    assert kept(case.reference, x, tape=False) == claim.eager + 8 * case.factors
    assert kept(case.fn, x, tape=True) == claim.here + 8 * case.factors


def test_is_stock_without_a_tape(device, case):
    x = random(3, 8, device=device)
    assert_same_result(run(case.fn, [x]), run(case.reference, [x]))
    assert kept(case.fn, x, tape=False) == kept(case.reference, x, tape=False)


def test_adds_to_the_gradient_in_stocks_order(device, case):
    only_on_cpu(device)

    def beside_others(fn):
        def op(x):
            z = x * 3
            return torch.sin(z) + fn(z) * 1e3 + torch.exp(z)  # z's gradient has four parts

        return op

    assert_exact(beside_others(case.fn), beside_others(case.reference), [random(64, 33, device=device)])


def test_in_a_module_is_exact(device, case):
    only_on_cpu(device)
    assert_exact(swapped(case.module(), case.op.name), case.module(), [random(3, 8, device=device)])


def test_knows_stock_by_its_source(case):
    assert match(case.module.forward, case.op.expressions) == {}
    assert match(case.other.forward, case.op.expressions) is None
