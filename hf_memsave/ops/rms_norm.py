r"""``rms_norm``: root-mean-square norm, as LLaMA and as T5 write it.

Forward (``[*, H]``; the mean is over H)::

    r = rsqrt(mean(x²) + eps)        in fp32
    y = w (x r)                      LLaMA rounds x r to x's dtype first, T5 to w's where that is a half

Kept for backward::

    eager    x in fp32 (the cast's copy), r, x r, its rounding, and y in the next linear
    here     x, r                    (the fp32 copy, x r, its rounding and y are promised)

Exact: stock's own operations run under autograd in stock's order; only what they keep is promised.
Source: Zhang and Sennrich (2019), arXiv:1910.07467.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hf_memsave.ops.cast import cast
from hf_memsave.ops.op import Binding, KeptBytes, Op
from hf_memsave.tape import promised


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The expression of ``LlamaRMSNorm`` in ``transformers``; the tests' ground truth."""
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def t5_layer_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The expression of ``T5LayerNorm`` in ``transformers``; the tests' ground truth."""
    h = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)
    return weight * (h.to(weight.dtype) if weight.dtype in (torch.float16, torch.bfloat16) else h)


def kept_bytes(shape: tuple[int, ...], itemsize: int) -> KeptBytes:
    """LLaMA's norm of ``[*, H]`` and the linear after it, beyond the weight and our copy of it; all want gradients."""
    rows, n = torch.Size(shape[:-1]).numel(), torch.Size(shape).numel()
    # eager: x (fp32) for pow and mul, r, the rounded product for w's gradient, y
    return KeptBytes(n * 4 + rows * 4 + n * itemsize * 2, n * itemsize + rows * 4)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """LLaMA's norm of ``x`` ``[*, H]`` with ``weight`` ``[H]``; keeps ``x`` and one fp32 number a row."""
    h = cast(x, torch.float32)
    r = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return promised(torch.mul, weight, cast(promised(torch.mul, h, r), x.dtype))


def t5_layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """T5's norm of ``x`` ``[*, H]`` with ``weight`` ``[H]``; keeps ``x`` and one fp32 number a row."""
    r = torch.rsqrt(cast(x, torch.float32).pow(2).mean(-1, keepdim=True) + eps)
    h = promised(torch.mul, x, r)
    return promised(torch.mul, weight, cast(h, weight.dtype) if weight.dtype in (torch.float16, torch.bfloat16) else h)


def _rms_norm(module: nn.Module, binding: Binding, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, binding.child(module, "weight"), binding.child(module, "eps"))


def _t5_layer_norm(module: nn.Module, binding: Binding, hidden_states: Tensor) -> Tensor:
    return t5_layer_norm(hidden_states, binding.child(module, "weight"), binding.child(module, "eps"))


def _check(module: nn.Module, names: Mapping[str, str]) -> str | None:
    weight, eps = (getattr(module, names.get(role, role), None) for role in ("weight", "eps"))
    if isinstance(weight, Tensor) and weight.dim() == 1 and isinstance(eps, float):
        return None
    return f"expected a weight of one dimension and a float {names.get('eps', 'eps')}, got {type(eps).__name__}"


_LLAMA = """
def forward(self, x):
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + self.eps)
    return self.weight * x.to(dtype)
"""
_T5 = """
def forward(self, x):
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + self.eps)
    if self.weight.dtype in [torch.float16, torch.bfloat16]:
        x = x.to(self.weight.dtype)
    return self.weight * x
"""

RMS_NORM = Op("rms_norm", "norm", _rms_norm, _check, expressions=(_LLAMA,))
T5_LAYER_NORM = Op("t5_layer_norm", "norm", _t5_layer_norm, _check, expressions=(_T5,))
