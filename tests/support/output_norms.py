"""Norms with ``norm="output"``, their gradients, and stock's and the true ones beside them."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hf_memsave.ops.approximate.output_norm import OUTPUT_NORM
from hf_memsave.patching.swap import Patch
from support.helpers import assert_same_bits, random, taping

EPS = 1e-6
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALVES = DTYPES[1:]
KINDS = {"layer_norm": nn.LayerNorm, "rms_norm": LlamaRMSNorm, "t5_layer_norm": T5LayerNorm}


def module_of(kind, weight, bias=None):
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


def from_output(module, **options):
    """``module`` as patched with ``norm="output"``."""
    return partial(OUTPUT_NORM.forward, module, Patch(type(module), op="output_norm", value="output", **options))


def vectors(ratio, gamma, width, dtype, device):
    """γ and β with |β/γ| about ``ratio``; "mixed" has columns of each kind."""
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
    x = x.detach().clone().requires_grad_()
    with taping():
        y = fn(x)
    return y.detach(), torch.autograd.grad(y, [x, *module.parameters()], dy)


def errors(got, truth):
    return [float((g.double() - t).norm() / (t.norm() or 1)) for g, t in zip(got, truth, strict=True)]


def truth_of(kind, module, x, dy):
    leaves = [t.detach().double().requires_grad_() for t in (x, *module.parameters())]
    return torch.autograd.grad(true_norm(kind, *leaves), leaves, dy.double())


def assert_at_most_twice_as_wrong(kind, module, x, dy):
    """Stock's output, and gradients at most twice as far from the truth as stock's; returns them."""
    truth = truth_of(kind, module, x, dy)
    y, got = gradients(module, from_output(module), x, dy)
    stock_y, stock = gradients(module, module, x, dy)
    assert_same_bits(y, stock_y)
    for mine, theirs in zip(errors(got, truth), errors(stock, truth), strict=True):
        assert mine <= 2 * theirs
    return got
