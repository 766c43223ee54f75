"""Norms, activations and feed-forwards of transformers, under a tape: stock's bits from their input alone, mostly."""

import pytest
import torch
from torch import nn

from support.helpers import (
    DTYPES,
    LAYOUTS,
    as_function,
    assert_backward_twice,
    assert_exact,
    assert_gradients_are_right,
    assert_no_worse_than_eager,
    autocasting,
    kept,
    only_on_cpu,
    random,
    subsets,
)
from support.modules import ACTIVATIONS, BATCH, HIDDEN, MLPS, MODULES, NORMS, OTHERS, ROWS, SEQ, WIDTH, given, made

SHAPE = (BATCH, SEQ, HIDDEN)
#: Norms that convert what they are given to fp32.
IN_FP32 = ("LlamaRMSNorm", "T5LayerNorm", "Gemma2RMSNorm")
SHAPELESS = [name for name in MODULES if "two dimensions" not in name]


def assert_is_stocks(module, x, view=lambda x: x, **options):
    only_on_cpu(x.device)
    call = as_function(module)

    def fn(x, *parameters):
        return call(view(x), *parameters)

    assert_exact(fn, fn, given(module, x), **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_it_is_exact(device, name, dtype):
    module = made(name, device, dtype)
    assert_is_stocks(module, random(*SHAPE, dtype=dtype, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*NORMS, "nn.GELU", "NewGELUActivation", "LlamaMLP", "Phi3MLP", "T5DenseActDense"])
def test_it_is_exact_for_every_subset_of_wanted_gradients(device, name, dtype):
    module = made(name, device, dtype)
    for wanted in subsets(1 + len(list(module.parameters()))):
        assert_is_stocks(module, random(*SHAPE, dtype=dtype, device=device), wanted=wanted)


@pytest.mark.parametrize("name", MODULES)
def test_it_is_exact_under_autocast(device, name):
    for dtype in (torch.float32, torch.bfloat16):
        for low in (torch.bfloat16, torch.float16):
            assert_is_stocks(made(name, device), random(*SHAPE, dtype=dtype, device=device), autocast=low)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_a_norm_is_exact_for_a_weight_of_another_dtype(device, name, dtypes):
    if name.startswith("layer norm") and dtypes[0] == torch.float32:
        pytest.skip("does not apply: stock refuses")
    assert_is_stocks(made(name, device, dtypes[1]), random(*SHAPE, dtype=dtypes[0], device=device))


@pytest.mark.parametrize("shape", [(HIDDEN,), (1, HIDDEN), (0, HIDDEN), (2, 0, HIDDEN), (2, 3, 1, HIDDEN)], ids=str)
@pytest.mark.parametrize("name", SHAPELESS)
def test_it_is_exact_for_odd_shapes(device, name, shape):
    assert_is_stocks(made(name, device), random(*shape, device=device))


@pytest.mark.parametrize("name", SHAPELESS)
def test_it_is_exact_for_views(device, name):
    x = random(4, 5, 2 * HIDDEN, device=device)
    for view in LAYOUTS.values():
        for dtype in (torch.float32, torch.bfloat16):
            module = made(name, device, dtype)
            assert_is_stocks(module, x.to(dtype), view=lambda x: view(x)[..., :HIDDEN])  # noqa: B023


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_exact_for_numbers_that_are_not_finite(device, name):
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 1e38, -1e38, -0.0], device=device)
    assert_is_stocks(made(name, device), x)


@pytest.mark.parametrize("name", MODULES)
def test_it_is_no_worse_than_eager(device, name):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        module = made(name, device, dtype)
        if "T5Dense" not in name:  # whose dropout draws other masks in float64
            call = as_function(module)
            assert_no_worse_than_eager(call, call, given(module, random(*SHAPE, dtype=dtype, device=device)))


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, module in MODULES.items() if module.smooth])
def test_it_has_the_right_gradients(device, name):
    module = made(name, device, torch.float64).requires_grad_(False)
    shape = SHAPE[1:] if "two dimensions" in name else (HIDDEN,)

    def call(x):
        torch.manual_seed(0)  # the same mask each time
        return module(x)[..., :3]

    assert_gradients_are_right(call, random(*shape, dtype=torch.float64, device=device), twice=len(shape) == 1)


@pytest.mark.parametrize("name", ["LlamaRMSNorm", "T5LayerNorm"])
def test_a_norm_that_computes_in_fp32_has_the_right_gradients(device, name, monkeypatch):
    monkeypatch.setattr(torch, "float32", torch.float64)  # in this test "fp32" is float64
    module = made(name, device, torch.float64)
    inputs = given(module, random(2, HIDDEN, dtype=torch.float64, device=device))
    assert_gradients_are_right(as_function(module), *inputs)


@pytest.mark.parametrize("name", MODULES)
def test_it_runs_backward_twice(device, name):
    module = made(name, device)
    assert_backward_twice(as_function(module), *given(module, random(*SHAPE, device=device)))


@pytest.mark.parametrize("name", [*NORMS, *ACTIVATIONS])
def test_it_adds_to_the_gradient_in_stocks_order(device, name):
    module = made(name, device)

    def beside_others(x, *parameters):
        z = x * 3
        return torch.sin(z) + as_function(module)(z, *parameters) * 1e3 + torch.exp(z)  # z's gradient has many parts

    only_on_cpu(device)
    assert_exact(beside_others, beside_others, given(module, random(*SHAPE, device=device)))


# What is kept.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_it_keeps_what_it_claims(device, name, dtype):
    only_on_cpu(device, "this count of bytes")
    module, x = made(name, device, dtype), random(*SHAPE, dtype=dtype, device=device)
    case = MODULES[name]
    claim = x.nbytes + case.extra(x.itemsize) + 8 * case.factors
    linear = name not in MLPS
    here, stock = (kept(module, x, tape=tape, linear=linear) for tape in (True, False))
    if name == "nn.RMSNorm":  # whose parts PyTorch hides on CPU
        assert here <= stock
    elif name in IN_FP32 and dtype == torch.float64:
        assert here < stock
    else:
        assert here <= claim < stock


@pytest.mark.parametrize("name", ["LlamaMLP", "Phi3MLP", "LlamaMLP of gelu_new"])
def test_a_feed_forward_under_autocast_keeps_no_copy_of_x_or_the_weights(device, name):
    module, x = made(name, device), random(*SHAPE, device=device)
    of_x = x.nbytes // 2 if name == "Phi3MLP" else x.nbytes  # where two linears share it, two halves or the whole
    claim = of_x + 2 * ROWS * WIDTH * 2 + 8 * MODULES[name].factors
    assert kept(module, x, tape=True, linear=False, autocast=torch.bfloat16) == claim


@pytest.mark.parametrize("name", ["T5DenseActDense", "T5DenseGatedActDense"])
def test_t5_keeps_no_copy_for_an_fp32_output_projection(device, name):
    """As Transformers loads T5 in half precision."""
    only_on_cpu(device)
    module, x = made(name, device, torch.bfloat16), random(*SHAPE, dtype=torch.bfloat16, device=device)
    before = kept(module, x, tape=True, linear=False)
    module.wo.float()
    assert kept(module, x, tape=True, linear=False) == before
    assert_is_stocks(module, x)
    assert_is_stocks(module.half(), x.half())


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_another_layer_is_exact_and_keeps_no_more_than_stock(device, name, autocast):
    make, call = OTHERS[name]
    torch.manual_seed(0)
    module, x = make().to(device), random(*SHAPE, device=device)

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, x):
            return call(self.module, x)

    try:
        with autocasting(device, autocast):
            call(module, x)
    except RuntimeError as error:  # an LSTM in bf16 on an older CPU
        pytest.skip(f"does not apply: stock refuses: {error}")
    assert_is_stocks(Calls(), x, autocast=autocast)
    here, stock = (kept(Calls(), x, tape, linear=False, autocast=autocast) for tape in (True, False))
    assert here <= stock
