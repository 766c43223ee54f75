r"""``fused_rms_norm``: RMSNorm as one kernel each way.

Kept for backward, x ``[T, H]``::

    stock    x, x in fp32, x̂, their factors: seven operations
    here     x, and a number a row; y is made again by the same kernel, bit for bit

Exact as mathematics, not stock's bits: all is computed in fp32 and rounded once. Gradients of gradients are refused.
Source: Zhang and Sennrich (2019), arXiv:1910.07467.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_memsave.ops.fused.kernels import can_run, kernels, taped
from hf_memsave.ops.op import Op, not_parametrized, once_differentiable


def _rms_norm(module: nn.Module, patch: Any, x: Tensor) -> Tensor:
    weight: Any = module.weight
    if not can_run(x, weight):
        return patch.stock.forward(module, x)
    style, name_of_eps = patch.value
    eps = getattr(module, name_of_eps)
    y: Tensor = taped(_RMSNorm, (x, weight, eps, style), (partial(_again, eps=eps, style=style), (x, weight)))
    return y


def _again(x: Tensor, weight: Tensor, eps: float, style: str) -> Tensor:
    return kernels().rms_norm_forward(x, weight, eps, style)[0]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, style: str) -> Tensor:
        y, rstd = kernels().rms_norm_forward(x, weight, eps, style)
        ctx.save_for_backward(x, weight, rstd)
        ctx.set_materialize_grads(False)
        ctx.style = style
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        dx, dw, _ = kernels().rms_norm_backward(dy, x, weight, rstd, ctx.style, ctx.needs_input_grad[1])
        return dx, dw, None, None


FUSED_RMS_NORM = Op("fused_rms_norm", _rms_norm, not_parametrized, is_implied=True, in_place="exact")
