"""Approximate ops where numbers are not plain: NaN, infinities, the largest and the smallest, γ near 0 or below."""

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hf_memsave.ops.few_bit import FewBit
from hf_memsave.ops.output_norm import OUTPUT_NORM, in_need
from hf_memsave.patching.swap import Patch
from support.helpers import DTYPES, assert_same_bits, only_on_cpu, random, swapped, taping

VALUES = {"invert": "invert", "precision_bit": "precision_bit", "few_bit 1": FewBit(1), "few_bit 8": FewBit(8)}
#: The largest error of a slope from an output of any dtype, and where few bits are kept.
ROOM = {"invert": 0.04, "precision_bit": 0.06, "few_bit 1": 0.6, "few_bit 8": 0.01}
NORMS = {"layer_norm": nn.LayerNorm, "rms_norm": LlamaRMSNorm, "t5_layer_norm": T5LayerNorm}


def odd(dtype, device):
    info = torch.finfo(dtype)
    values = [info.smallest_normal, info.smallest_normal / 4, info.tiny, 0.0, info.max, info.max / 2, float("inf")]
    return torch.tensor([*values, *(-v for v in values), float("nan")], dtype=torch.float64).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("make", [nn.GELU, lambda: nn.GELU("tanh"), nn.SiLU], ids=["gelu", "gelu-tanh", "silu"])
def test_an_activation_of_odd_numbers(make, value, dtype, device):
    """The slope of every number but NaN is near stock's where that is a number; and NaN stays NaN."""
    x = odd(dtype, device)
    module = swapped(make(), "activation", VALUES[value])
    found = []
    for layer in (module, make()):
        leaf = x.clone().requires_grad_()
        with taping():
            y = layer(leaf)
        found.append((y.detach(), torch.autograd.grad(y, leaf, torch.ones_like(y))[0]))
    (y, dx), (stock, slope) = found
    if value != "precision_bit":
        assert_same_bits(y, stock)
    assert y[-1].isnan() and (dx[-1].isnan() or value.startswith("few_bit"))
    near = stock.isfinite() & slope.isfinite()
    near &= x > -torch.finfo(dtype).max / 4  # below, stock's tanh formula gives NaN or 0 by dtype
    assert near.sum() > 6
    assert ((dx - slope).abs()[near] <= ROOM[value]).all(), (dx, slope)


def gammas(width, dtype, device):
    """Every kind of γ, few enough of those that keep their input; and a β that stays below."""
    gamma = 1 + 0.1 * random(width, seed=1)
    gamma[1::2] *= -1
    info = torch.finfo(dtype)
    gamma = gamma.to(device, dtype)
    gamma[0], gamma[8], gamma[16], gamma[24] = 0.0, info.smallest_normal, -info.smallest_normal / 2, -0.0
    gamma[4] = 9 * info.tiny
    return gamma


def norms(kind, width, dtype, device):
    module = NORMS[kind](width, eps=1e-6).to(device, dtype)
    module.weight.data.copy_(gammas(width, dtype, device))
    if kind == "layer_norm":
        module.bias.data.copy_(0.3 * module.weight.data * random(width, seed=2).sign().to(module.weight))
    return module, lambda x: OUTPUT_NORM.forward(module, Patch(type(module), op="output_norm", value="output"), x)


def gradients(fn, module, x, dy):
    leaf = x.clone().requires_grad_()
    with taping():
        y = fn(leaf)
    return y.detach(), torch.autograd.grad(y, [leaf, *module.parameters()], dy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_output_norm_with_every_kind_of_gamma(kind, dtype, device):
    """0, -0, tiny, subnormal and negative ones: as near to the truth as stock, times two."""
    module, patched = norms(kind, 64, dtype, device)
    assert set(in_need(module.weight, None).tolist()) == {0, 8, 16, 24}
    x, dy = random(128, 64, dtype=dtype, device=device), random(128, 64, dtype=dtype, device=device, seed=9)
    (y, got), (stock_y, stock) = (gradients(fn, module, x, dy) for fn in (patched, module))
    assert_same_bits(y, stock_y)
    twin = NORMS[kind](64, eps=1e-6).double().to(device)
    twin.load_state_dict({name: p.double() for name, p in module.state_dict().items()})
    truth = gradients(twin, twin, x.double(), dy.double())[1]
    for mine, theirs, true in zip(got, stock, truth, strict=True):
        assert mine.isfinite().all()
        allowed = 2 * (theirs.double() - true).norm() + torch.finfo(dtype).eps * true.norm()
        assert (mine.double() - true).norm() <= allowed


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_output_norm_of_a_row_that_is_not_finite(kind, bad, device):
    """Its row alone has no gradient, as in stock."""
    module, patched = norms(kind, 64, torch.float32, device)
    x, dy = random(8, 64, device=device), random(8, 64, device=device, seed=9)
    x[3, 5] = bad
    (y, got), (stock_y, stock) = (gradients(fn, module, x, dy) for fn in (patched, module))
    assert_same_bits(y, stock_y)
    rows = [number for number in range(8) if number != 3]
    torch.testing.assert_close(got[0][rows], stock[0][rows], rtol=1e-4, atol=1e-5)
    assert got[0][3].isnan().any() and stock[0][3].isnan().any()


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-30], ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_output_norm_of_next_to_nothing(kind, scale, device):
    """Rows whose variance is far below eps: the gradients are finite, and near stock's."""
    only_on_cpu(device, "what becomes of subnormal numbers")
    module, patched = norms(kind, 64, torch.float32, device)
    x, dy = scale * random(8, 64, device=device), random(8, 64, device=device, seed=9)
    (_, got), (_, stock) = (gradients(fn, module, x, dy) for fn in (patched, module))
    assert all(t.isfinite().all() for t in got)
    torch.testing.assert_close(got[0], stock[0], rtol=1e-3, atol=1e-3 * float(stock[0].abs().max()))
