"""``quick_gelu``: the bits of Transformers' expression, and only its input is kept."""

import pytest
import torch
from helpers import (
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
from transformers.activations import QuickGELUActivation, SiLUActivation

from hf_memsave.ops.expression import match
from hf_memsave.ops.quick_gelu import QUICK_GELU, kept_bytes, quick_gelu, quick_gelu_reference

#: Autograd keeps the factor 1.702 as a number: a float64 tensor.
FACTOR = 8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quick_gelu_reference_is_stock(device, dtype):
    x = random(3, 8, dtype=dtype, device=device)
    assert_same_bits(quick_gelu_reference(x), QuickGELUActivation()(x))


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quick_gelu_is_exact(device, dtype, wanted):
    only_on_cpu(device)
    assert_exact(quick_gelu, quick_gelu_reference, [random(7, 5, 9, dtype=dtype, device=device)], wanted=[wanted])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quick_gelu_is_exact_under_autocast(device, dtype):
    only_on_cpu(device)
    x = random(3, 8, dtype=dtype, device=device)
    assert_exact(quick_gelu, quick_gelu_reference, [x], autocast=torch.bfloat16)


@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (2, 0, 4), (2, 1, 7)], ids=str)
def test_quick_gelu_is_exact_for_odd_shapes(device, shape):
    only_on_cpu(device)
    assert_exact(quick_gelu, quick_gelu_reference, [random(*shape, device=device)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quick_gelu_is_exact_for_views(device, layout, dtype):
    only_on_cpu(device)
    view = LAYOUTS[layout]
    x = random(4, 5, 8, dtype=dtype, device=device)
    assert_exact(lambda x: quick_gelu(view(x)), lambda x: quick_gelu_reference(view(x)), [x])


def test_quick_gelu_is_exact_for_numbers_that_are_not_finite(device):
    only_on_cpu(device)
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 1e38, -1e38, -0.0], device=device)
    assert_exact(quick_gelu, quick_gelu_reference, [x])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quick_gelu_is_no_worse_than_eager(device, dtype):
    assert_no_worse_than_eager(quick_gelu, quick_gelu_reference, [random(3, 8, dtype=dtype, device=device)])


def test_quick_gelu_has_the_right_gradients(device):
    assert_gradients_are_right(quick_gelu, random(2, 3, dtype=torch.float64, device=device))


def test_quick_gelu_runs_backward_twice(device):
    assert_backward_twice(quick_gelu, random(3, 8, device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quick_gelu_keeps_what_it_claims(device, dtype):
    x = random(3, 5, 8, dtype=dtype, device=device)
    claim = kept_bytes(tuple(x.shape), x.itemsize)
    assert kept(quick_gelu_reference, x, tape=False) == claim.eager + FACTOR
    assert kept(quick_gelu, x, tape=True) == claim.here + FACTOR


def test_quick_gelu_is_stock_without_a_tape(device):
    x = random(3, 8, device=device)
    assert_same_result(run(quick_gelu, [x]), run(quick_gelu_reference, [x]))
    assert kept(quick_gelu, x, tape=False) == kept(quick_gelu_reference, x, tape=False)


def test_quick_gelu_adds_to_the_gradient_in_stocks_order(device):
    only_on_cpu(device)

    def beside_others(fn):
        def op(x):
            z = x * 3
            return torch.sin(z) + fn(z) * 1e3 + torch.exp(z)  # z's gradient has four parts

        return op

    assert_exact(beside_others(quick_gelu), beside_others(quick_gelu_reference), [random(64, 33, device=device)])


def test_quick_gelu_in_a_module_is_exact(device):
    only_on_cpu(device)
    assert_exact(swapped(QuickGELUActivation(), "quick_gelu"), QuickGELUActivation(), [random(3, 8, device=device)])


def test_quick_gelu_knows_stock_by_its_source():
    assert match(QuickGELUActivation.forward, QUICK_GELU.expressions) == {}
    assert match(SiLUActivation.forward, QUICK_GELU.expressions) is None
