"""Layers of transformers that are made of cheap functions and products: how to make each, and what it keeps."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from transformers import LlamaConfig, Phi3Config, T5Config
from transformers.activations import (
    ACT2FN,
    FastGELUActivation,
    GELUActivation,
    GELUTanh,
    MishActivation,
    NewGELUActivation,
    QuickGELUActivation,
    ReLUSquaredActivation,
    SiLUActivation,
)
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.t5.modeling_t5 import T5DenseActDense, T5DenseGatedActDense, T5LayerNorm

BATCH, SEQ, HIDDEN, WIDTH = 4, 32, 32, 48
ROWS = BATCH * SEQ
#: What the kept state of dropout's generator takes.
STATE = {"cpu": 5056, "cuda": 16}


class Module(NamedTuple):
    """A layer of an input ``[*, HIDDEN]``.

    Attributes:
        make: Makes it.
        extra: Bytes that it and the linear after it keep beyond its input, by the bytes of an element.
        factors: Numbers in its expression, which autograd keeps as float64 tensors.
        smooth: Whether it has derivatives everywhere, in float64.
    """

    make: Callable[[], nn.Module]
    extra: Callable[[int], int] = lambda itemsize: 0
    factors: int = 0
    smooth: bool = True


def _rms(make: Callable[..., nn.Module]) -> Module:
    # One number a row in fp32, and a private copy of the weight; it computes in fp32, too coarse for differences.
    return Module(make, lambda itemsize: 4 * ROWS + HIDDEN * itemsize, smooth=False)


def _llama(act: str) -> Callable[[], nn.Module]:
    return lambda: LlamaMLP(LlamaConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, hidden_act=act))


def _phi3() -> nn.Module:
    return Phi3MLP(Phi3Config(hidden_size=HIDDEN, intermediate_size=WIDTH, pad_token_id=0))


def _t5(kind: type[nn.Module], act: str, dropout: float = 0.1) -> Callable[[], nn.Module]:
    return lambda: kind(T5Config(d_model=HIDDEN, d_ff=WIDTH, dropout_rate=dropout, feed_forward_proj=act))


def _wide(times: int, dropout: bool = False) -> Callable[[int], int]:
    return lambda itemsize: times * ROWS * WIDTH * itemsize + (STATE["cpu"] if dropout else 0)


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
    "GELUActivation": Module(GELUActivation),
    "GELUActivation in Python": Module(
        lambda: GELUActivation(use_gelu_python=True), lambda itemsize: ROWS * HIDDEN * itemsize, factors=2
    ),
    "GELUTanh": Module(GELUTanh),
    "GELUTanh in Python": Module(lambda: GELUTanh(use_gelu_tanh_python=True), factors=3),
    "NewGELUActivation": Module(NewGELUActivation, factors=3),
    "FastGELUActivation": Module(FastGELUActivation, factors=3),
    "QuickGELUActivation": Module(QuickGELUActivation, factors=1),
    "SiLUActivation": Module(SiLUActivation),
    "MishActivation": Module(MishActivation),
    "ReLUSquaredActivation": Module(ReLUSquaredActivation, smooth=False),
    "ClippedGELUActivation": Module(lambda: ACT2FN["gelu_10"], smooth=False),
    "LaplaceActivation": Module(lambda: ACT2FN["laplace"], factors=2, smooth=False),
}
MLPS = {
    "LlamaMLP": Module(_llama("silu"), _wide(2)),
    **{f"LlamaMLP of {act}": Module(_llama(act), _wide(2), factors) for act, factors in
       (("gelu", 0), ("gelu_pytorch_tanh", 0), ("gelu_new", 3), ("quick_gelu", 1))},
    "LlamaMLP of relu": Module(_llama("relu"), _wide(2), smooth=False),
    "Phi3MLP": Module(_phi3, _wide(2)),
    "T5DenseActDense": Module(_t5(T5DenseActDense, "relu"), _wide(1, dropout=True), smooth=False),
    "T5DenseGatedActDense": Module(_t5(T5DenseGatedActDense, "gated-gelu"), _wide(2, dropout=True), 3),
    "T5DenseGatedActDense of silu": Module(_t5(T5DenseGatedActDense, "gated-silu"), _wide(2, dropout=True)),
    "T5DenseGatedActDense without dropout": Module(_t5(T5DenseGatedActDense, "gated-gelu", 0.0), _wide(2), 3),
}  # fmt: skip
MODULES = {**NORMS, **ACTIVATIONS, **MLPS}


#: Layers that hide what they do in functions of C++ or Python, or that are seldom seen: no more than stock.
OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
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


def made(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The layer, its vectors random."""
    torch.manual_seed(0)
    module = MODULES[name].make().to(device, dtype)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    return module


def given(module: nn.Module, x: Tensor) -> list[Tensor]:
    """What :func:`support.helpers.as_function` takes."""
    return [x, *module.parameters()]
