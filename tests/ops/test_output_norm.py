"""``norm="output"``: stock's forward, and gradients from the output that are no worse than twice stock's error."""

import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hf_memsave.errors import KeptTensorChangedError
from hf_memsave.ops import output_norm as output_norm_file
from hf_memsave.ops.output_norm import OUTPUT_NORM, in_need, kept_bytes, layer_normed, output_norm, rms_normed
from hf_memsave.patching.swap import Patch
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

EPS = 1e-6
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALVES = DTYPES[1:]
KINDS = {"layer_norm": nn.LayerNorm, "rms_norm": LlamaRMSNorm, "t5_layer_norm": T5LayerNorm}
#: How much of dy is x̂: see the op's docstring on what lies beyond.
CORRELATIONS = (0.0, 0.5, 0.7)
WITHOUT_BIAS = (("rms_norm", 0), ("t5_layer_norm", 0))
GAMMAS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 0.0, "mixed")


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def module_of(kind, weight, bias=None):
    """Stock's norm with these parameters."""
    module = KINDS[kind](weight.shape[0], eps=EPS).to(weight)
    module.weight.data.copy_(weight)
    if kind == "layer_norm":
        module.bias.data.copy_(torch.zeros_like(weight) if bias is None else bias)
    return module


def plain(kind, device="cpu", dtype=torch.float32, width=16, keeps=0):
    """A norm whose first ``keeps`` columns have too large a β, or a γ of 0."""
    weight, bias = 1 + 0.1 * random(width, seed=3), 0.3 * random(width, seed=4).clamp(-2, 2)
    weight[:keeps], bias[:keeps] = (1, 10) if kind == "layer_norm" else (0, 0)
    return module_of(kind, weight.to(device, dtype), bias.to(device, dtype))


def from_output(module):
    """``module`` as patched with ``norm="output"``."""
    return partial(OUTPUT_NORM.forward, module, Patch(type(module), op="output_norm", value="output"))


def vectors(ratio, gamma, width, dtype, device):
    """γ and β with |β/γ| about ``ratio``; "mixed" has columns of each kind, few enough to keep their inputs."""
    weight, sign = 1 + 0.1 * random(width, seed=1), random(width, seed=2).sign()
    if gamma == "mixed":
        bias = min(ratio, 1) * weight * sign
        bias[::16] *= max(ratio, 1)
        weight[1::32] = 0
    else:
        bias = ratio * weight * sign * (gamma or 1)
        weight *= gamma
    return weight.to(device, dtype), bias.to(device, dtype)


def true_norm(kind, x, weight, bias=None):
    if kind == "layer_norm":
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


def incoming(kind, x, correlation):
    """Gradients of which the share ``correlation`` is x̂."""
    ones = torch.ones(x.shape[-1], dtype=torch.float64, device=x.device)
    normed = true_norm(kind, x.double(), ones)
    noise = random(*x.shape, dtype=torch.float64, device=x.device, seed=9)
    return (correlation * normed + (1 - correlation**2) ** 0.5 * noise).to(x.dtype)


def gradients(module, fn, x, dy):
    """y, and the gradients of x, γ and β."""
    x = x.detach().clone().requires_grad_()
    with taping():
        y = fn(x)
    return y.detach(), torch.autograd.grad(y, [x, *module.parameters()], dy)


def errors(got, truth):
    """Relative L2 errors; absolute ones of what is 0."""
    return [float((g.double() - t).norm() / (t.norm() or 1)) for g, t in zip(got, truth, strict=True)]


def truth_of(kind, module, x, dy):
    leaves = [t.detach().double().requires_grad_() for t in (x, *module.parameters())]
    return torch.autograd.grad(true_norm(kind, *leaves), leaves, dy.double())


@pytest.mark.parametrize("gamma", GAMMAS, ids=str)
@pytest.mark.parametrize(("kind", "ratio"), [*(("layer_norm", r) for r in (0, 0.5, 1, 10, 100)), *WITHOUT_BIAS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_norm_is_at_most_twice_as_wrong_as_stock(device, kind, dtype, ratio, gamma):
    module = module_of(kind, *vectors(ratio, gamma, 768, dtype, device))
    x = random(64, 768, dtype=dtype, device=device)
    for dy in (incoming(kind, x, c) for c in CORRELATIONS):
        truth = truth_of(kind, module, x, dy)
        y, got = gradients(module, from_output(module), x, dy)
        stock_y, stock = gradients(module, module, x, dy)
        assert_same_bits(y, stock_y)
        for mine, theirs in zip(errors(got, truth), errors(stock, truth), strict=True):
            assert mine <= 2 * theirs


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


def test_output_norm_would_be_wrong_if_no_column_kept_its_input(device):
    module = plain("layer_norm", device, keeps=2)
    module.bias.data[:2] = 1000
    x = random(64, 16, device=device)
    dy = incoming("layer_norm", x, 0.5)
    truth = truth_of("layer_norm", module, x, dy)
    stock = errors(gradients(module, module, x, dy)[1], truth)

    def worst(columns):
        norm = partial(output_norm, partial(layer_normed, eps=EPS))
        _, got = gradients(module, lambda x: norm(x, module.weight, module.bias, columns), x, dy)
        return max(mine / theirs for mine, theirs in zip(errors(got, truth), stock, strict=True))

    assert worst(None) > 50
    assert worst(in_need(module.weight, module.bias)) < 2


@pytest.fixture
def asked(monkeypatch):
    """How many norms each transfer told of, where the host waits for the device as for CUDA."""
    numbers, ask = [], output_norm_file._ask
    monkeypatch.setattr(output_norm_file, "waits", lambda x: True)
    monkeypatch.setattr(output_norm_file, "_asking", weakref.WeakSet())
    monkeypatch.setattr(output_norm_file, "_ask", lambda norms: numbers.append(len(norms)) or ask(norms))
    return numbers


@pytest.mark.parametrize("kind", KINDS)
def test_norms_that_ask_together_find_what_each_would(asked, kind):
    modules = [module_of(kind, *vectors(10.0 if kind == "layer_norm" else 0, "mixed", 64, torch.float32, "cpu"))]
    modules += [plain(kind, width=32, keeps=n) for n in (0, 2)]
    for _ in range(2):
        with taping():
            for module in modules:
                bias = getattr(module, "bias", None)
                assert_same_bits(output_norm_file._columns(module, module.weight, bias), in_need(module.weight, bias))
    assert asked == [1, 1, 1, 3]


def test_a_norm_that_changes_asks_again(asked):
    module = plain("rms_norm")
    x = random(4, 16).requires_grad_()
    with taping():
        from_output(module)(x)
        with torch.no_grad():
            module.weight[3] = 0
        y = from_output(module)(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert asked == [1, 1]
    assert dx.isfinite().all()


def test_nothing_is_asked_where_nobody_differentiates(asked, monkeypatch):
    monkeypatch.setattr(output_norm_file, "in_need", lambda weight, bias: asked.append(None))
    module, x = plain("rms_norm"), random(4, 16)
    with torch.no_grad():
        y = from_output(module)(x)
    assert_same_bits(y, module(x))
    assert not asked


def test_one_of_another_dtype_or_sharded_is_not_asked(asked):
    here, low, elsewhere, freed = (plain("rms_norm", dtype=d) for d in (*DTYPES[:2], *2 * DTYPES[:1]))
    elsewhere.to("meta")
    freed.weight.untyped_storage().resize_(0)
    output_norm_file._asking.update((low, elsewhere, freed))
    with taping():
        output_norm_file._columns(here, here.weight, None)
    assert asked == [1]


def test_output_norm_finds_the_columns_in_need():
    tiny = torch.finfo(torch.float16).tiny
    weight = torch.tensor([1, -1, 1, -1, 0, 4 * tiny, 8 * tiny, float("nan"), 1], dtype=torch.float16)
    bias = torch.tensor([1, -1, 1.01, -1.01, 0, 0, 0, 0, float("nan")], dtype=torch.float16)
    assert in_need(weight, bias).tolist() == [2, 3, 4, 5, 7, 8]
    assert in_need(weight, None).tolist() == [4, 5, 7]


@pytest.mark.parametrize("keeps", [0, 1, 2])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_output_norm_keeps_what_it_claims(device, kind, dtype, keeps):
    only_on_cpu(device, "the size of stock's statistics")
    if dtype == torch.float64 and kind != "layer_norm":
        pytest.skip("its statistics are fp32")
    module = plain(kind, device, dtype, keeps=keeps)
    x = random(3, 5, 16, dtype=dtype, device=device)
    claim = kept_bytes(tuple(x.shape), x.itemsize, keeps, kind == "layer_norm")
    assert kept(from_output(module), x, tape=True) == claim.here
    if kind == "layer_norm":
        assert kept(module, x, tape=False) == claim.eager


def test_output_norm_shares_its_output_with_the_next_linear(device, kind):
    module, x = plain(kind, device), random(3, 5, 16, device=device)
    alone = kept(from_output(module), x, tape=True, linear=False)
    assert kept(from_output(module), x, tape=True) == alone


def assert_is_exact(module, x, autocast=None):
    got = run(from_output(module), [x], tape=True, autocast=autocast)
    assert_same_result(got, run(module, [x], autocast=autocast))


@pytest.mark.parametrize("why", ["columns", "dtype", "autocast"])
def test_output_norm_recomputes_where_y_would_not_do(device, why):
    only_on_cpu(device)
    half = torch.bfloat16
    module = plain(
        "layer_norm", device, half if why == "autocast" else torch.float32, keeps=3 if why == "columns" else 0
    )
    x = random(3, 16, dtype=torch.float32 if why == "columns" else half, device=device)
    assert_is_exact(module, x, half if why == "autocast" else None)


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


@pytest.mark.parametrize("columns", [None, [0, 2]], ids=str)
def test_output_norm_has_the_right_gradients(device, monkeypatch, columns):
    # RMSNorm computes in fp32, too coarse for finite differences: in this test "fp32" is float64.
    monkeypatch.setattr(torch, "float32", torch.float64)
    x, weight, bias = (
        random(*s, dtype=torch.float64, device=device, seed=i) for i, s in enumerate([(3, 4), (4,), (4,)])
    )
    columns = None if columns is None else torch.tensor(columns, device=device)
    layer, rms = (
        lambda x, w, b=None, f=f: output_norm(partial(f, eps=EPS), x, w, b, columns) for f in (layer_normed, rms_normed)
    )
    assert_gradients_are_right(layer, x, weight, bias, twice=False)
    assert_gradients_are_right(rms, x, weight, twice=False)


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
        y = output_norm(partial(layer_normed, eps=EPS), x, module.weight, module.bias)
    with torch.no_grad():
        getattr(module, name).add_(1)
    with pytest.raises(KeptTensorChangedError if tape else RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_output_norm_runs_backward_twice_but_not_through_itself(device, kind):
    norm, x = from_output(plain(kind, device, keeps=2)), random(3, 16, device=device)
    assert_backward_twice(norm, x)
    leaf = x.requires_grad_()
    (dx,) = torch.autograd.grad(norm(leaf).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_output_norm_under_checkpointing(device, kind):
    norm = from_output(plain(kind, device, keeps=2))

    def block(x):
        with taping():
            return norm(x).square()

    x = random(3, 16, device=device)
    assert_same_result(run(lambda x: checkpoint(block, x, use_reentrant=False), [x]), run(block, [x]))


def test_output_norm_under_autocast(device, kind):
    module, x = plain(kind, device), random(3, 16, device=device)
    got, stock = (run(f, [x], tape=True, autocast=torch.bfloat16) for f in (from_output(module), module))
    assert_same_bits(got.output, stock.output)
    torch.testing.assert_close(got.of_inputs, stock.of_inputs)


def test_output_norm_without_gradients(device, kind):
    module, x = plain(kind, device).eval(), random(3, 16, device=device)
    with torch.no_grad():
        assert_same_bits(from_output(module)(x), module(x))
