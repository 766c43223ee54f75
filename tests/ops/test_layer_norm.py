"""``layer_norm``: PyTorch's own bits, and its output is not kept."""

import pytest
import torch
from torch import nn

from hf_memsave.ops.layer_norm import kept_bytes, layer_norm, layer_norm_reference
from support.helpers import (
    DTYPES,
    LAYOUTS,
    assert_backward_twice,
    assert_exact,
    assert_gradients_are_right,
    assert_no_worse_than_eager,
    assert_same_result,
    kept,
    nbytes,
    only_on_cpu,
    random,
    run,
    subsets,
    swapped,
)

EPS = 1e-5


def norm(x, weight=None, bias=None):
    return layer_norm(x, x.shape[-1:], weight, bias, EPS)


def reference(x, weight=None, bias=None):
    return layer_norm_reference(x, weight, bias, EPS)


def inputs(device, shape=(3, 5, 8), dtype=torch.float32, vector_dtype=None):
    vectors = [random(shape[-1], dtype=vector_dtype or dtype, device=device, seed=s) for s in (3, 4)]
    return [random(*shape, dtype=dtype, device=device), *vectors]


@pytest.mark.parametrize("wanted", subsets(3), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm_is_exact(device, dtype, wanted):
    only_on_cpu(device)
    assert_exact(norm, reference, inputs(device, dtype=dtype), wanted=wanted)


def test_layer_norm_is_exact_without_bias(device):
    only_on_cpu(device)
    assert_exact(norm, reference, inputs(device)[:2])


def test_layer_norm_is_exact_without_weight(device):
    only_on_cpu(device)
    x, _, bias = inputs(device)
    assert_exact(lambda x, b: norm(x, None, b), lambda x, b: reference(x, None, b), [x, bias])


def test_layer_norm_is_exact_without_parameters(device):
    only_on_cpu(device)
    assert_exact(norm, reference, inputs(device)[:1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_layer_norm_is_exact_for_fp32_parameters(device, dtype):
    only_on_cpu(device)
    assert_exact(norm, reference, inputs(device, dtype=dtype, vector_dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_norm_is_exact_under_autocast(device, dtype):
    only_on_cpu(device)
    assert_exact(norm, reference, inputs(device, dtype=dtype, vector_dtype=torch.float32), autocast=torch.bfloat16)


@pytest.mark.parametrize("shape", [(3,), (1,), (2, 1), (0, 4), (2, 0, 4), (2, 3, 1, 7)], ids=str)
def test_layer_norm_is_exact_for_odd_shapes(device, shape):
    only_on_cpu(device)
    assert_exact(norm, reference, inputs(device, shape))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_norm_is_exact_for_views(device, layout):
    only_on_cpu(device)
    view = LAYOUTS[layout]
    x = random(4, 5, 8, device=device)
    vectors = [random(view(x).shape[-1], device=device, seed=s) for s in (3, 4)]
    assert_exact(lambda x, w, b: norm(view(x), w, b), lambda x, w, b: reference(view(x), w, b), [x, *vectors])


@pytest.mark.parametrize("affine", [{}, {"bias": False}, {"elementwise_affine": False}], ids=str)
@pytest.mark.parametrize("shape", [(8,), (5, 8)], ids=str)
def test_layer_norm_in_a_module_is_exact(device, shape, affine):
    only_on_cpu(device)
    stock, ours = (nn.LayerNorm(shape, 1e-3, device=device, **affine) for _ in range(2))
    assert_exact(swapped(ours, "layer_norm"), stock, inputs(device)[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_layer_norm_is_no_worse_than_eager(device, dtype):
    assert_no_worse_than_eager(norm, reference, inputs(device, dtype=dtype))


def test_layer_norm_has_the_right_gradients(device):
    assert_gradients_are_right(norm, *inputs(device, (2, 3), torch.float64))


def test_layer_norm_runs_backward_twice(device):
    assert_backward_twice(norm, *inputs(device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm_keeps_what_it_claims(device, dtype):
    x, *vectors = inputs(device, dtype=dtype)
    for vector in vectors:
        vector.requires_grad_()
    claim = kept_bytes(tuple(x.shape), x.itemsize)
    assert kept(lambda x: reference(x, *vectors), x, tape=False) == claim.eager
    assert kept(lambda x: norm(x, *vectors), x, tape=True) == claim.here + nbytes(*vectors)  # private copies


def test_layer_norm_is_stock_without_a_tape(device):
    x, *vectors = inputs(device)
    assert_same_result(run(norm, [x, *vectors]), run(reference, [x, *vectors]))
    assert kept(lambda x: norm(x, *vectors), x, tape=False) == kept(lambda x: reference(x, *vectors), x, tape=False)
