"""Norms, activations and feed-forwards of transformers, under a tape: stock's bits from their input alone, mostly."""

from itertools import product

import pytest
import torch

from support.calls import Calls
from support.helpers import (
    DTYPES,
    LAYOUTS,
    as_function,
    assert_backward_twice,
    assert_exact,
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
LOW = (torch.bfloat16, torch.float16)


def assert_is_stocks(module, x, view=lambda x: x, **options):
    only_on_cpu(x.device)
    call = as_function(module)

    def fn(x, *parameters):
        return call(view(x), *parameters)

    assert_exact(fn, fn, given(module, x), **options)


@pytest.mark.parametrize("name", MODULES)
def test_it_is_exact(device, name):
    """In every dtype, for every choice of gradients, under autocast, and for odd shapes and views."""
    for dtype in DTYPES:
        assert_is_stocks(made(name, device, dtype), random(*SHAPE, dtype=dtype, device=device))
    for dtype in (torch.float32, torch.bfloat16):
        module, x = made(name, device, dtype), random(*SHAPE, dtype=dtype, device=device)
        for wanted in subsets(1 + len(list(module.parameters()))):
            assert_is_stocks(module, x, wanted=wanted)
    module, x = made(name, device), random(*SHAPE, device=device)
    for dtype, low in product((torch.float32, torch.bfloat16), LOW):
        assert_is_stocks(module, x.to(dtype), autocast=low)
    assert_backward_twice(as_function(module), *given(module, x))
    if "two dimensions" in name:
        return
    for shape in ((HIDDEN,), (1, HIDDEN), (0, HIDDEN), (2, 0, HIDDEN), (2, 3, 1, HIDDEN)):
        assert_is_stocks(module, random(*shape, device=device))
    for view, dtype in product(LAYOUTS.values(), (torch.float32, torch.bfloat16)):
        x = random(4, 5, 2 * HIDDEN, dtype=dtype, device=device)
        assert_is_stocks(made(name, device, dtype), x, view=lambda x: view(x)[..., :HIDDEN])  # noqa: B023


def test_a_norm_is_exact_for_a_weight_of_another_dtype(device):
    for name, (dtype, of_weight) in product(NORMS, ((LOW[0], torch.float32), (torch.float32, LOW[0]))):
        if not name.startswith("layer norm") or dtype != torch.float32:  # which stock refuses
            assert_is_stocks(made(name, device, of_weight), random(*SHAPE, dtype=dtype, device=device))


def test_an_activation_is_exact_for_numbers_that_are_not_finite(device):
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 1e38, -1e38, -0.0], device=device)
    for name in ACTIVATIONS:
        assert_is_stocks(made(name, device), x)


def test_it_adds_to_the_gradient_in_stocks_order(device):
    only_on_cpu(device)
    for name in [*NORMS, *ACTIVATIONS]:
        module = made(name, device)

        def beside_others(x, *parameters, module=module):
            z = x * 3  # whose gradient has many parts
            return torch.sin(z) + as_function(module)(z, *parameters) * 1e3 + torch.exp(z)

        assert_exact(beside_others, beside_others, given(module, random(*SHAPE, device=device)))


# What is kept.


@pytest.mark.parametrize("name", MODULES)
def test_it_keeps_what_it_claims(device, name):
    only_on_cpu(device, "this count of bytes")
    case = MODULES[name]
    for dtype in (torch.float32, torch.float16, torch.float64):
        module, x = made(name, device, dtype), random(*SHAPE, dtype=dtype, device=device)
        claim = x.nbytes + case.extra(x.itemsize) + 8 * case.factors
        here, stock = (kept(module, x, tape=tape, linear=name not in MLPS) for tape in (True, False))
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


@pytest.mark.parametrize("name", OTHERS)
def test_another_layer_is_exact_and_keeps_no_more_than_stock(device, name):
    make, call = OTHERS[name]
    torch.manual_seed(0)
    layer, x = make().to(device), random(*SHAPE, device=device)
    model = Calls(lambda x: call(layer, x))
    model.layer = layer
    for autocast in (None, torch.bfloat16):
        try:
            with autocasting(device, autocast):
                model(x)
        except RuntimeError as error:  # an LSTM in bf16 on an older CPU
            pytest.skip(f"does not apply: stock refuses: {error}")
        assert_is_stocks(model, x, autocast=autocast)
        here, stock = (kept(model, x, tape, linear=False, autocast=autocast) for tape in (True, False))
        assert here <= stock
