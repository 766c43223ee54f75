"""What CUDA runs where CPU runs something else, on the stand-in device: attention, and the fused RMSNorm.

Each attention kernel keeps q, k, v, its output, a number for each query and head, and what it drew:

    "flash"      16 bits, no mask; k and v may have fewer heads
    "efficient"  any mask, expanded to all heads; as many heads of k and v as of q
    "cudnn"      16 bits, any mask; k and v may have fewer heads

The first that can run is taken, beginning with the one that was asked for; then there is the product of matrices, which
keeps the probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from hf_memsave.device import HALVES, mask_multiple
from hf_memsave.measure.private import library

aten = torch.ops.aten
#: Kernels by name, in the order in which PyTorch prefers them (before Hopper's, where cuDNN may come first).
ATTENTION = ("flash", "efficient", "cudnn")
#: The widest head of each.
_WIDEST = {"flash": 256, "efficient": 1 << 16, "cudnn": 256}


class Preferred:
    """The kernel that is asked for."""

    name = ATTENTION[0]


def register_kernels() -> None:
    """Have the stand-in device run them. Once per process."""
    lib = library("aten")
    lib.impl("scaled_dot_product_attention", attention, "AutogradPrivateUse1")
    lib.impl("_fused_sdp_choice", choice, "AutogradPrivateUse1")
    lib.impl("rms_norm", rms_norm, "AutogradPrivateUse1")


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` as a CUDA device runs it."""
    name = chosen(query, key, value, attn_mask, enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # -65504 takes as many bytes
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
    return _RUN[name](query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def chosen(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool) -> str:
    """The name of the kernel for these arguments."""
    is_half = query.dtype in HALVES
    is_grouped = enable_gqa and query.shape[-3] != key.shape[-3]
    width = query.shape[-1]
    can = {
        "flash": is_half and mask is None and width == value.shape[-1],
        "efficient": not is_grouped,
        "cudnn": is_half and width % 8 == 0,
    }
    order = (Preferred.name, *ATTENTION[:2])
    return next((name for name in order if can[name] and width <= _WIDEST[name] and query.dim() == 4), "math")


def choice(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> int:  # fmt: skip
    """Its number in ``torch.nn.attention.SDPBackend``."""
    backend: int = _BACKENDS[chosen(query, key, value, attn_mask, enable_gqa)].value
    return backend


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, is_causal: bool, scale: Any, gqa: bool) -> Tensor:
    width = q.shape[-1]
    if width % 8:
        scale = width**-0.5 if scale is None else scale
        q, k, v = (F.pad(x, (0, -width % 8)) for x in (q, k, v))
    return aten._scaled_dot_product_flash_attention(q, k, v, p, is_causal, scale=scale)[0][..., :width]


def _efficient(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, is_causal: bool, scale: Any, gqa: bool) -> Tensor:
    if mask is not None:
        length, multiple = mask.shape[-1], mask_multiple(mask)
        if mask.stride(-1) != 1 or any(stride % multiple for stride in mask.stride()[:-1]):
            mask = F.pad(mask, (0, multiple - length % multiple))[..., :length]
        mask = mask.expand(*q.shape[:-1], k.shape[-2])
    wants = any(x.requires_grad for x in (q, k, v)) and torch.is_grad_enabled()
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, wants, p, is_causal, scale=scale)[0]


def _cudnn(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, is_causal: bool, scale: Any, gqa: bool) -> Tensor:
    wants = any(x.requires_grad for x in (q, k, v)) and torch.is_grad_enabled()
    return aten._scaled_dot_product_cudnn_attention(q, k, v, mask, wants, p, is_causal, False, scale=scale)[0]


def _math(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, is_causal: bool, scale: Any, gqa: bool) -> Tensor:
    return aten._scaled_dot_product_attention_math(q, k, v, mask, p, is_causal, scale=scale, enable_gqa=gqa)[0]


_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip
_RUN: dict[str, Callable[..., Tensor]] = {"flash": _flash, "efficient": _efficient, "cudnn": _cudnn, "math": _math}


def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """``F.rms_norm``: one kernel, which keeps its input and a number a row."""
    return aten._fused_rms_norm(x, shape, weight, eps)[0]


def workspace(func: Any, args: Any) -> int:
    """Bytes that a kernel takes for itself while it runs: backward of attention sums dq in fp32, and dk, dv by head."""
    if func in _BACKWARDS and args[1].dtype in HALVES:
        q, k = args[1:3]
        repeated = 2 * q.numel() * q.itemsize if func is _BACKWARDS[0] and k.shape[1] != q.shape[1] else 0
        return 4 * q.numel() + repeated
    return 0


_BACKWARDS = (
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
)
