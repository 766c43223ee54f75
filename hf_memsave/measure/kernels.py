"""What CUDA runs where CPU runs something else, on the stand-in device: attention, and the fused RMSNorm.

Each attention kernel keeps q, k, v, its output, a number for each query and head, and what it drew:

    "flash"      16 bits, no mask; k and v may have fewer heads
    "efficient"  any mask, expanded to all heads; as many heads of k and v as of q
    "cudnn"      16 bits, any mask; k and v may have fewer heads

The first that can run is taken, beginning with the one that was asked for; then there is the product of matrices, which
keeps the probabilities.
"""

from __future__ import annotations

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
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip
_BACKWARDS = (
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
)


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
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """``F.scaled_dot_product_attention`` as a CUDA device runs it."""
    name = chosen(query, key, value, attn_mask, enable_gqa)
    q, k, v, mask, width = query, key, value, attn_mask, query.shape[-1]
    if mask is not None and mask.dtype == torch.bool:  # -65504 takes as many bytes
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask.logical_not(), -torch.inf)
    if name == "math":
        return aten._scaled_dot_product_attention_math(
            q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if name == "flash":
        if width % 8:
            scale = width**-0.5 if scale is None else scale
            q, k, v = (F.pad(x, (0, -width % 8)) for x in (q, k, v))
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0][..., :width]
    wants = any(x.requires_grad for x in (q, k, v)) and torch.is_grad_enabled()
    if name == "cudnn":
        run = aten._scaled_dot_product_cudnn_attention
        return run(q, k, v, mask, wants, dropout_p, is_causal, False, scale=scale)[0]
    if mask is not None:
        length, multiple = mask.shape[-1], mask_multiple(mask)
        if mask.stride(-1) != 1 or any(stride % multiple for stride in mask.stride()[:-1]):
            mask = F.pad(mask, (0, multiple - length % multiple))[..., :length]
        mask = mask.expand(*q.shape[:-1], k.shape[-2])
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, wants, dropout_p, is_causal, scale=scale)[0]


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
    """The number of the chosen kernel in ``torch.nn.attention.SDPBackend``."""
    backend: int = BACKENDS[chosen(query, key, value, attn_mask, enable_gqa)].value
    return backend


def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """``F.rms_norm``: one kernel, which keeps its input and a number a row."""
    return aten._fused_rms_norm(x, shape, weight, eps)[0]


def workspace(func: Any, args: Any) -> int:
    """Bytes that a kernel takes for itself while it runs: backward of attention sums dq in fp32, and dk, dv by head."""
    if func not in _BACKWARDS or args[1].dtype not in HALVES:
        return 0
    q, k = args[1:3]
    repeated = 2 * q.numel() * q.itemsize if func is _BACKWARDS[0] and k.shape[1] != q.shape[1] else 0
    return 4 * q.numel() + repeated
