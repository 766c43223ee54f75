"""``rms_norm`` and ``t5_layer_norm``: the bits of stock's expressions, for x and one fp32 number a row."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hf_memsave.ops.expression import match
from hf_memsave.ops.rms_norm import (
    RMS_NORM,
    T5_LAYER_NORM,
    kept_bytes,
    rms_norm,
    rms_norm_reference,
    t5_layer_norm,
    t5_layer_norm_reference,
)
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
    nbytes,
    only_on_cpu,
    random,
    run,
    subsets,
    swapped,
)

EPS = 1e-6
EPS_NAME = {"eps": "variance_epsilon"}
NORMS = {
    "llama": (partial(rms_norm, eps=EPS), partial(rms_norm_reference, eps=EPS)),
    "t5": (partial(t5_layer_norm, eps=EPS), partial(t5_layer_norm_reference, eps=EPS)),
}
MODULES = {"llama": (LlamaRMSNorm, RMS_NORM), "t5": (T5LayerNorm, T5_LAYER_NORM)}


@pytest.fixture(params=NORMS)
def name(request):
    return request.param


@pytest.fixture
def norm(name):
    return NORMS[name][0]


@pytest.fixture
def reference(name):
    return NORMS[name][1]


def inputs(device, shape=(3, 5, 8), dtype=torch.float32, weight_dtype=None):
    return [
        random(*shape, dtype=dtype, device=device),
        random(shape[-1], dtype=weight_dtype or dtype, device=device, seed=3),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_reference_is_stock(device, name, reference, dtype):
    x, weight = inputs(device, dtype=dtype)
    module = MODULES[name][0](8, EPS).to(device, dtype)
    module.weight.data.copy_(weight)
    assert_same_bits(reference(x, weight), module(x))


@pytest.mark.parametrize("wanted", subsets(2), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_is_exact(device, norm, reference, dtype, wanted):
    only_on_cpu(device)
    assert_exact(norm, reference, inputs(device, dtype=dtype), wanted=wanted)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rms_norm_is_exact_for_a_weight_of_another_dtype(device, norm, reference, dtype, weight_dtype):
    only_on_cpu(device)
    assert_exact(norm, reference, inputs(device, dtype=dtype, weight_dtype=weight_dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_is_exact_under_autocast(device, norm, reference, dtype):
    only_on_cpu(device)
    assert_exact(norm, reference, inputs(device, dtype=dtype, weight_dtype=torch.float32), autocast=torch.bfloat16)


@pytest.mark.parametrize("shape", [(3,), (1,), (2, 1), (0, 4), (2, 0, 4), (2, 3, 1, 7)], ids=str)
def test_rms_norm_is_exact_for_odd_shapes(device, norm, reference, shape):
    only_on_cpu(device)
    assert_exact(norm, reference, inputs(device, shape))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_is_exact_for_views(device, norm, reference, layout, dtype):
    only_on_cpu(device)
    view = LAYOUTS[layout]
    x = random(4, 5, 8, dtype=dtype, device=device)
    weight = random(view(x).shape[-1], dtype=dtype, device=device, seed=3)
    assert_exact(lambda x, w: norm(view(x), w), lambda x, w: reference(view(x), w), [x, weight])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rms_norm_is_no_worse_than_eager(device, norm, reference, dtype):
    assert_no_worse_than_eager(norm, reference, inputs(device, dtype=dtype))


def test_rms_norm_has_the_right_gradients(device, norm, monkeypatch):
    # The norm computes in fp32, too coarse for finite differences: in this test "fp32" is float64.
    monkeypatch.setattr(torch, "float32", torch.float64)
    assert_gradients_are_right(norm, *inputs(device, (2, 3), torch.float64))


def test_rms_norm_runs_backward_twice(device, norm):
    assert_backward_twice(norm, *inputs(device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_keeps_what_it_claims(device, dtype):
    x, weight = inputs(device, dtype=dtype)
    weight.requires_grad_()
    claim = kept_bytes(tuple(x.shape), x.itemsize)
    assert kept(lambda x: rms_norm_reference(x, weight, EPS), x, tape=False) == claim.eager
    assert kept(lambda x: rms_norm(x, weight, EPS), x, tape=True) == claim.here + nbytes(weight)  # a private copy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_t5_layer_norm_keeps_x_and_one_number_a_row(device, dtype):
    x, weight = inputs(device, dtype=dtype)
    weight.requires_grad_()
    assert kept(lambda x: t5_layer_norm(x, weight, EPS), x, tape=True) == nbytes(x, weight) + 4 * 3 * 5


def test_rms_norm_is_stock_without_a_tape(device, name, norm, reference):
    x, weight = inputs(device)
    assert_same_result(run(norm, [x, weight]), run(reference, [x, weight]))
    weight.requires_grad_()
    stock = kept(lambda x: reference(x, weight), x, tape=False)
    assert kept(lambda x: norm(x, weight), x, tape=False) == stock


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_in_a_module_is_exact(device, name, dtype):
    only_on_cpu(device)
    cls, op = MODULES[name]
    x = random(3, 8, dtype=dtype, device=device)
    stock = cls(8, EPS).to(device, dtype)
    assert_exact(swapped(cls(8, EPS).to(device, dtype), op.name, **EPS_NAME), stock, [x])


def test_rms_norm_knows_stock_by_its_source(name):
    cls, op = MODULES[name]
    assert match(cls.forward, op.expressions) == {"weight": "weight", "eps": "variance_epsilon"}


class _OnePlusWeight(nn.Module):
    """Gemma's norm."""

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return (1.0 + self.weight) * x.to(dtype)


def test_rms_norm_refuses_another_expression(name):
    assert match(_OnePlusWeight.forward, MODULES[name][1].expressions) is None


def test_rms_norm_tells_t5s_expression_from_llamas():
    assert match(T5LayerNorm.forward, RMS_NORM.expressions) is None
    assert match(LlamaRMSNorm.forward, T5_LAYER_NORM.expressions) is None
