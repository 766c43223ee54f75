r"""``fused_activation``: an activation as one kernel each way; and ``fused_gated``: a gated MLP's product likewise.

Kept for backward::

    stock               x of GELU and SiLU; of GELU written out in Python, up to seven tensors; act(gate), gate and up
    fused_activation    x
    fused_gated         gate and up

Exact as mathematics, not stock's bits: all is computed in fp32 and rounded once. Gradients of gradients are refused.
Source: Hendrycks and Gimpel (2016), arXiv:1606.08415; Shazeer (2020), arXiv:2002.05202.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_memsave.ops.approximate.activation import ACTIVATION
from hf_memsave.ops.approximate.elementwise import name_of
from hf_memsave.ops.fused.kernels import ACTIVATIONS, can_run, is_watched, kernels, taped
from hf_memsave.ops.op import Op, once_differentiable


def _activation(module: nn.Module, patch: Any, x: Tensor) -> Tensor:
    name = _kernel_of(module)
    if _has_no_kernel(module, None) or not can_run(x):  # it may have changed since it was patched
        return patch.stock.forward(module, x)
    y: Tensor = taped(_Activation, (x, name), (partial(kernels().activation_forward, act=name), (x,)))
    return y


def _kernel_of(module: nn.Module) -> str:
    return ACTIVATIONS.get(name_of(module) or "", "")


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, act: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        ctx.act = act
        return kernels().activation_forward(x, act)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return kernels().activation_backward(dy, x, ctx.act)[0], None


def _gated(module: nn.Module, patch: Any, x: Tensor) -> Tensor:
    """The forward of an MLP that says ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``."""
    parts: Any = module
    gate, up = parts.gate_proj(x), parts.up_proj(x)
    act = _kernel_of(parts.act_fn)
    is_known = not (_has_no_kernel(parts.act_fn, None) or is_watched(parts.act_fn))
    if is_known and gate.dtype == up.dtype and can_run(gate, up):
        z = taped(_Gated, (gate, up, act), (partial(kernels().gated_forward, act=act), (gate, up)))
    else:
        z = parts.act_fn(gate) * up
    return parts.down_proj(z)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.set_materialize_grads(False)
        ctx.act = act
        return kernels().gated_forward(gate, up, act)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        dg, du, _ = kernels().gated_backward(dz, gate, up, ctx.act)
        return dg, du, None


def _has_no_kernel(module: nn.Module, value: Any) -> str:
    return ACTIVATION.check(module, value) or ("" if _kernel_of(module) else "there is no kernel for it")


def _is_no_gated_mlp(module: nn.Module, value: Any) -> str:
    parts = ("gate_proj", "up_proj", "down_proj", "act_fn")
    if not all(isinstance(getattr(module, part, None), nn.Module) for part in parts):
        return f"it has not the parts {', '.join(parts)}"
    return _has_no_kernel(module.get_submodule("act_fn"), value)


FUSED_ACTIVATION = Op("fused_activation", _activation, _has_no_kernel, is_implied=True, in_place="exact")
FUSED_GATED = Op("fused_gated", _gated, _is_no_gated_mlp, is_implied=True, in_place="exact")
