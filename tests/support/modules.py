"""Layers of transformers that are made of cheap functions and products: how to make each, and what it keeps."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from transformers import LlamaConfig, Phi3Config, T5Config, activations
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.t5.modeling_t5 import T5DenseActDense, T5DenseGatedActDense, T5LayerNorm

BATCH, SEQ, HIDDEN, WIDTH = 4, 32, 32, 48
ROWS = BATCH * SEQ
#: What the kept state of dropout's generator takes.
STATE = {"cpu": 5056, "cuda": 16}


class Module(NamedTuple):
    """A layer of an input ``[*, HIDDEN]``."""

    make: Any
    extra: Any = lambda itemsize: 0  # bytes that it and the linear after it keep beyond its input
    factors: int = 0  # numbers in its expression, which autograd keeps as float64 tensors
    smooth: bool = True  # whether it has derivatives everywhere, in float64


def _rms(make):
    # One number a row in fp32, and a private copy of the weight; it computes in fp32, too coarse for differences.
    return Module(make, lambda itemsize: 4 * ROWS + HIDDEN * itemsize, smooth=False)


def _mlp(make, times=2, state=0, factors=0, smooth=True):
    return Module(make, lambda itemsize: times * ROWS * WIDTH * itemsize + state, factors, smooth)


def _llama(act, **options):
    return _mlp(lambda: LlamaMLP(LlamaConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, hidden_act=act)), **options)


def _t5(kind, act, dropout=0.1, **options):
    config = T5Config(d_model=HIDDEN, d_ff=WIDTH, dropout_rate=dropout, feed_forward_proj=act)
    return _mlp(lambda: kind(config), state=STATE["cpu"] if dropout else 0, **options)


NORMS = {
    "layer norm": Module(lambda: nn.LayerNorm(HIDDEN), lambda itemsize: 2 * ROWS * itemsize + 2 * HIDDEN * itemsize),
    "layer norm without bias": Module(
        lambda: nn.LayerNorm(HIDDEN, 1e-3, bias=False), lambda itemsize: 2 * ROWS * itemsize + HIDDEN * itemsize
    ),
    "layer norm without parameters": Module(
        lambda: nn.LayerNorm(HIDDEN, elementwise_affine=False), lambda itemsize: 2 * ROWS * itemsize
    ),
    "layer norm of two dimensions": Module(
        lambda: nn.LayerNorm((SEQ, HIDDEN)), lambda itemsize: 2 * BATCH * itemsize + 2 * SEQ * HIDDEN * itemsize
    ),
    "LlamaRMSNorm": _rms(lambda: LlamaRMSNorm(HIDDEN)),
    "T5LayerNorm": _rms(lambda: T5LayerNorm(HIDDEN)),
    "Gemma2RMSNorm": _rms(lambda: Gemma2RMSNorm(HIDDEN)),
    "nn.RMSNorm": Module(lambda: nn.RMSNorm(HIDDEN), smooth=False),
}
ACTIVATIONS = {
    "nn.GELU": Module(nn.GELU),
    "nn.GELU tanh": Module(lambda: nn.GELU("tanh")),
    "nn.SiLU": Module(nn.SiLU),
    "nn.Mish": Module(nn.Mish),
    "nn.ELU": Module(nn.ELU),
    "nn.Softplus": Module(nn.Softplus),
    "nn.Hardswish": Module(nn.Hardswish, smooth=False),
    "GELUActivation": Module(activations.GELUActivation),
    "GELUActivation in Python": Module(
        lambda: activations.GELUActivation(use_gelu_python=True), lambda itemsize: ROWS * HIDDEN * itemsize, factors=2
    ),
    "GELUTanh": Module(activations.GELUTanh),
    "GELUTanh in Python": Module(lambda: activations.GELUTanh(use_gelu_tanh_python=True), factors=3),
    "NewGELUActivation": Module(activations.NewGELUActivation, factors=3),
    "FastGELUActivation": Module(activations.FastGELUActivation, factors=3),
    "QuickGELUActivation": Module(activations.QuickGELUActivation, factors=1),
    "SiLUActivation": Module(activations.SiLUActivation),
    "MishActivation": Module(activations.MishActivation),
    "ReLUSquaredActivation": Module(activations.ReLUSquaredActivation, smooth=False),
    "ClippedGELUActivation": Module(lambda: activations.ACT2FN["gelu_10"], smooth=False),
    "LaplaceActivation": Module(lambda: activations.ACT2FN["laplace"], factors=2, smooth=False),
}
MLPS = {
    "LlamaMLP": _llama("silu"),
    "LlamaMLP of gelu": _llama("gelu"),
    "LlamaMLP of gelu_pytorch_tanh": _llama("gelu_pytorch_tanh"),
    "LlamaMLP of gelu_new": _llama("gelu_new", factors=3),
    "LlamaMLP of quick_gelu": _llama("quick_gelu", factors=1),
    "LlamaMLP of relu": _llama("relu", smooth=False),
    "Phi3MLP": _mlp(lambda: Phi3MLP(Phi3Config(hidden_size=HIDDEN, intermediate_size=WIDTH, pad_token_id=0))),
    "T5DenseActDense": _t5(T5DenseActDense, "relu", times=1, smooth=False),
    "T5DenseGatedActDense": _t5(T5DenseGatedActDense, "gated-gelu", factors=3),
    "T5DenseGatedActDense of silu": _t5(T5DenseGatedActDense, "gated-silu"),
    "T5DenseGatedActDense without dropout": _t5(T5DenseGatedActDense, "gated-gelu", 0.0, factors=3),
}
MODULES = {**NORMS, **ACTIVATIONS, **MLPS}

#: Layers that hide what they do in functions of C++ or Python, or that are seldom seen: no more than stock.
OTHERS = {
    "MultiheadAttention": (lambda: nn.MultiheadAttention(HIDDEN, 4, dropout=0.1), lambda m, x: m(x, x, x)[0]),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(HIDDEN, 4, WIDTH), lambda m, x: m(x)),
    "TransformerDecoderLayer": (lambda: nn.TransformerDecoderLayer(HIDDEN, 4, WIDTH), lambda m, x: m(x, x)),
    "LSTM": (lambda: nn.LSTM(HIDDEN, HIDDEN), lambda m, x: m(x)[0]),
    "GRU": (lambda: nn.GRU(HIDDEN, HIDDEN), lambda m, x: m(x)[0]),
    "weight_norm": (lambda: weight_norm(nn.Linear(HIDDEN, HIDDEN)), lambda m, x: m(x)),
    "spectral_norm": (lambda: spectral_norm(nn.Linear(HIDDEN, HIDDEN)).eval(), lambda m, x: m(x)),
    "Bilinear": (lambda: nn.Bilinear(HIDDEN, HIDDEN, 8), lambda m, x: m(x, x)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(SEQ, affine=True), lambda m, x: m(x)),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), lambda m, x: m(x)),
    "CosineSimilarity": (nn.CosineSimilarity, lambda m, x: m(x, x.flip(0))),
    "PReLU": (nn.PReLU, lambda m, x: m(x)),
    "Softmax": (lambda: nn.Softmax(-1), lambda m, x: m(x)),
    "gumbel softmax": (nn.Identity, lambda m, x: F.gumbel_softmax(x, hard=True)),
    "cross entropy": (nn.Identity, lambda m, x: F.cross_entropy(x.flatten(0, 1), torch.zeros(ROWS).to(x).long())[None]),
    "smooth l1": (nn.Identity, lambda m, x: F.smooth_l1_loss(x, x * 2)[None]),
    "cumsum": (nn.Identity, lambda m, x: x.cumsum(0).exp()),
    "sort": (nn.Identity, lambda m, x: x.sort()[0].exp() * x),
    "fft": (nn.Identity, lambda m, x: torch.fft.rfft(x).abs()),
    "einsum": (lambda: nn.Linear(HIDDEN, HIDDEN), lambda m, x: torch.einsum("abc,dc->abd", x, m.weight)),
}


def made(name, device, dtype=torch.float32):
    torch.manual_seed(0)
    module = MODULES[name].make().to(device, dtype)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    return module


def given(module, x):
    """What :func:`support.helpers.as_function` takes."""
    return [x, *module.parameters()]
