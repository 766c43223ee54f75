"""``norm="output"``: stock's forward, and gradients from the output that are no worse than twice stock's error."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_memsave import patch
from hf_memsave.errors import KeptTensorChangedError
from hf_memsave.ops.output_norm import kept_bytes, layer_normed, output_norm, rms_normed
from support.helpers import (
    LAYOUTS,
    assert_backward_twice,
    assert_gradients_are_right,
    assert_same_bits,
    assert_same_result,
    kept,
    layout,
    only_on_cpu,
    random,
    run,
    taping,
)
from support.output_norms import (
    DTYPES,
    EPS,
    HALVES,
    KINDS,
    assert_at_most_twice_as_wrong,
    errors,
    from_output,
    gradients,
    incoming,
    module_of,
    plain,
    truth_of,
    vectors,
)

#: How much of dy is x̂: see the op's docstring on what lies beyond.
CORRELATIONS = (0.0, 0.5, 0.7)
WITHOUT_BIAS = (("rms_norm", 0), ("t5_layer_norm", 0))
GAMMAS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 0.0, "mixed")


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.mark.parametrize("gamma", GAMMAS, ids=str)
@pytest.mark.parametrize(("kind", "ratio"), [*(("layer_norm", r) for r in (0, 0.5, 1, 10, 100)), *WITHOUT_BIAS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_norm_is_at_most_twice_as_wrong_as_stock(device, kind, dtype, ratio, gamma):
    module = module_of(kind, *vectors(ratio, gamma, 768, dtype, device))
    x = random(64, 768, dtype=dtype, device=device)
    for dy in (incoming(kind, x, c) for c in CORRELATIONS):
        assert_at_most_twice_as_wrong(kind, module, x, dy)


@pytest.mark.parametrize(("kind", "ratio"), [*(("layer_norm", r) for r in (0, 0.5, 1)), *WITHOUT_BIAS])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_output_norm_is_at_most_twice_as_wrong_as_rounding(device, kind, dtype, ratio):
    # On CPU stock's own error is larger: its statistics are halves, and LLaMA's products too.
    module = module_of(kind, *vectors(ratio, 1.0, 768, dtype, device))
    x = random(64, 768, dtype=dtype, device=device)
    for dy in (incoming(kind, x, c) for c in CORRELATIONS):
        truth = truth_of(kind, module, x, dy)
        rounded = [t.to(dtype) for t in truth]
        _, got = gradients(module, from_output(module), x, dy)
        for mine, floor in zip(errors(got, truth), errors(rounded, truth), strict=True):
            assert mine <= 2 * floor


@pytest.mark.parametrize("keeps", [0, 2, 16])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_output_norm_keeps_what_it_claims(device, kind, dtype, keeps):
    only_on_cpu(device, "the size of stock's statistics")
    if dtype == torch.float64 and kind != "layer_norm":
        pytest.skip("does not apply: its statistics are fp32")
    module = plain(kind, device, dtype, keeps=keeps)
    x = random(3, 5, 16, dtype=dtype, device=device)
    claim = kept_bytes(tuple(x.shape), x.itemsize, kind == "layer_norm")
    assert kept(from_output(module), x, tape=True) == claim.here
    if kind == "layer_norm":
        assert kept(module, x, tape=False) == claim.eager


@pytest.mark.parametrize("shape", [(5, 8), (8,)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_output_norm_in_layer_norms_of_any_shape(device, shape, bias):
    module = nn.LayerNorm(shape, 1e-3, bias=bias, device=device)
    x = random(3, 5, 8, device=device)
    got, stock = (gradients(module, f, x, x.cos()) for f in (from_output(module), module))
    assert_same_bits(got[0], stock[0])
    torch.testing.assert_close(got[1], stock[1])


@pytest.mark.parametrize("shape", [(16,), (0, 16), (2, 0, 16), (2, 3, 1, 16)], ids=str)
def test_output_norm_takes_odd_shapes(device, kind, shape):
    module, x = plain(kind, device, keeps=2), random(*shape, device=device)
    got, stock = run(from_output(module), [x], tape=True), run(module, [x])
    assert_same_bits(got.output, stock.output)
    torch.testing.assert_close(got.of_inputs, stock.of_inputs)


@pytest.mark.parametrize("view", LAYOUTS)
def test_output_norm_takes_views(device, kind, view):
    x = random(4, 6, 16, device=device)
    module = plain(kind, device, width=LAYOUTS[view](x).shape[-1], keeps=1)
    got, stock = (run(lambda x: f(LAYOUTS[view](x)), [x], tape=True) for f in (from_output(module), module))  # noqa: B023
    assert layout(got.output) == layout(stock.output)
    torch.testing.assert_close(got.of_inputs[0], stock.of_inputs[0])


@pytest.mark.parametrize("columns", [[], [0, 2], [0, 1, 2, 3]], ids=str)
def test_output_norm_has_the_right_gradients(device, monkeypatch, columns):
    # RMSNorm computes in fp32, too coarse for finite differences: in this test "fp32" is float64.
    monkeypatch.setattr(torch, "float32", torch.float64)
    x, weight, bias = (
        random(*s, dtype=torch.float64, device=device, seed=i) for i, s in enumerate([(3, 4), (4,), (4,)])
    )
    weight, bias = weight.sign() + 0.1 * weight, 0.1 * bias
    large, none = bias.clone(), weight.clone()
    large[columns], none[columns] = 10.0, 0.0
    assert_gradients_are_right(lambda *args: output_norm(layer_normed, *args, EPS), x, weight, large, twice=False)
    assert_gradients_are_right(lambda *args: output_norm(rms_normed, *args, None, EPS), x, none, twice=False)


def test_output_norm_of_frozen_parameters(device, kind):
    module = plain(kind, device).requires_grad_(False)
    x = random(3, 16, device=device)
    torch.testing.assert_close(run(from_output(module), [x], tape=True).of_inputs, run(module, [x]).of_inputs)


@pytest.mark.parametrize("tape", [True, False])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_output_norm_raises_where_a_parameter_was_changed(device, name, tape):
    module, x = plain("layer_norm", device), random(3, 16, device=device).requires_grad_()
    if tape:
        with taping():
            y = from_output(module)(x)
    else:
        y = output_norm(layer_normed, x, module.weight, module.bias, EPS)
    with torch.no_grad():
        getattr(module, name).add_(1)
    with pytest.raises(KeptTensorChangedError if tape else RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_output_norm_runs_backward_twice_but_not_through_itself(device, kind):
    norm, x = from_output(plain(kind, device, keeps=2)), random(3, 16, device=device)
    assert_backward_twice(norm, x)
    leaf = x.requires_grad_()
    with taping():
        y = norm(leaf)
    (dx,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_a_layer_norm_with_an_epsilon_of_zero(device):
    x = random(3, 16, device=device)
    stock = nn.LayerNorm(16, eps=0.0).to(device)
    stock(x).square().sum().backward()
    expected = stock.weight.grad.clone()
    stock.weight.grad = None
    model = nn.Sequential(stock)
    patch(model, {"norm": "output"})
    model(x).square().sum().backward()
    torch.testing.assert_close(stock.weight.grad, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_output_norm_under_checkpointing(device, kind, use_reentrant):
    norm = from_output(plain(kind, device, keeps=2))

    def block(x):
        with taping() if torch.is_grad_enabled() else contextlib.nullcontext():
            return norm(x).square()

    x = random(3, 16, device=device)
    assert_same_result(run(lambda x: checkpoint(block, x, use_reentrant=use_reentrant), [x]), run(block, [x]))


def test_output_norm_under_autocast(device, kind):
    module, x = plain(kind, device), random(3, 16, device=device)
    got, stock = (run(f, [x], tape=True, autocast=torch.bfloat16) for f in (from_output(module), module))
    assert_same_bits(got.output, stock.output)
    torch.testing.assert_close(got.of_inputs, stock.of_inputs)


def test_output_norm_without_gradients(device, kind):
    module, x = plain(kind, device).eval(), random(3, 16, device=device)
    with torch.no_grad():
        assert_same_bits(from_output(module)(x), module(x))
