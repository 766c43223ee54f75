"""Norms with γ and β of all kinds, as stock and from their output."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hf_memsave.ops.output_norm import OUTPUT_NORM
from hf_memsave.patching.swap import Patch
from support.helpers import random

EPS = 1e-6
KINDS = {"layer_norm": nn.LayerNorm, "rms_norm": LlamaRMSNorm, "t5_layer_norm": T5LayerNorm}


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
