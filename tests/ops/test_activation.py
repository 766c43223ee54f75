"""``activation``: GELU, tanh-GELU and SiLU with PyTorch's own bits, and only their input is kept."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import GELUActivation, GELUTanh, SiLUActivation

from hf_memsave.ops.activation import ACTIVATION, kept_bytes
from support.helpers import (
    DTYPES,
    LAYOUTS,
    assert_backward_twice,
    assert_exact,
    assert_gradients_are_right,
    assert_no_worse_than_eager,
    assert_same_result,
    kept,
    only_on_cpu,
    random,
    run,
    swapped,
)

tanh_gelu = partial(F.gelu, approximate="tanh")
#: How to build the module, and the function that it is.
KINDS = {
    "gelu": (nn.GELU, F.gelu),
    "gelu-tanh": (partial(nn.GELU, "tanh"), tanh_gelu),
    "silu": (nn.SiLU, F.silu),
    "transformers-gelu": (GELUActivation, F.gelu),
    "transformers-gelu-tanh": (GELUTanh, tanh_gelu),
    "transformers-silu": (SiLUActivation, F.silu),
}


@pytest.fixture(params=["gelu", "gelu-tanh", "silu"])
def kind(request):
    return request.param


@pytest.fixture
def op(kind):
    return swapped(KINDS[kind][0](), "activation")


@pytest.fixture
def reference(kind):
    return KINDS[kind][1]


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activation_is_exact(device, op, reference, dtype, wanted):
    only_on_cpu(device)
    assert_exact(op, reference, [random(3, 5, 8, dtype=dtype, device=device)], wanted=[wanted])


@pytest.mark.parametrize("kind", KINDS)
def test_activation_is_exact_in_every_module(device, op, reference):
    only_on_cpu(device)
    assert_exact(op, reference, [random(3, 8, device=device)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activation_is_exact_under_autocast(device, op, reference, dtype):
    only_on_cpu(device)
    assert_exact(op, reference, [random(3, 8, dtype=dtype, device=device)], autocast=torch.bfloat16)


@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (2, 0, 4), (2, 1, 7)], ids=str)
def test_activation_is_exact_for_odd_shapes(device, op, reference, shape):
    only_on_cpu(device)
    assert_exact(op, reference, [random(*shape, device=device)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_activation_is_exact_for_views(device, op, reference, layout):
    only_on_cpu(device)
    view = LAYOUTS[layout]
    assert_exact(lambda x: op(view(x)), lambda x: reference(view(x)), [random(4, 5, 8, device=device)])


def test_activation_is_exact_for_numbers_that_are_not_finite(device, op, reference):
    only_on_cpu(device)
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 1e38, -1e38, -0.0], device=device)
    assert_exact(op, reference, [x])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_activation_is_no_worse_than_eager(device, op, reference, dtype):
    assert_no_worse_than_eager(op, reference, [random(3, 8, dtype=dtype, device=device)])


def test_activation_has_the_right_gradients(device, op):
    assert_gradients_are_right(op, random(2, 3, dtype=torch.float64, device=device))


def test_activation_runs_backward_twice(device, op):
    assert_backward_twice(op, random(3, 8, device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activation_keeps_what_it_claims(device, op, reference, dtype):
    x = random(3, 5, 8, dtype=dtype, device=device)
    claim = kept_bytes(tuple(x.shape), x.itemsize)
    assert kept(reference, x, tape=False) == claim.eager
    assert kept(op, x, tape=True) == claim.here


def test_activation_is_stock_without_a_tape(device, op, reference):
    x = random(3, 8, device=device)
    assert_same_result(run(op, [x]), run(reference, [x]))
    assert kept(op, x, tape=False) == kept(reference, x, tape=False)


@pytest.mark.parametrize("kind", KINDS)
def test_activation_accepts_its_kinds(kind):
    assert ACTIVATION.check(KINDS[kind][0](), {}) is None


def test_activation_refuses_to_work_in_place():
    assert "inplace=True" in ACTIVATION.check(nn.SiLU(inplace=True), {})


@pytest.mark.parametrize(
    "module", [GELUActivation(use_gelu_python=True), GELUTanh(use_gelu_tanh_python=True)], ids=repr
)
def test_activation_refuses_gelu_in_python(module):
    assert "intermediates are kept" in ACTIVATION.check(module, {})
