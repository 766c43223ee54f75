r"""``fused_activation``: an activation as one kernel each way; and ``fused_gated``: a gated MLP's product likewise.

Kept for backward::

    stock               x of GELU and SiLU; of GELU written out in Python, up to seven tensors; act(gate), gate and up
    fused_activation    x
    fused_gated         gate and up

Source: Hendrycks and Gimpel (2016), arXiv:1606.08415; Shazeer (2020), arXiv:2002.05202.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from hf_memsave.ops.approximate.activation import ACTIVATION
from hf_memsave.ops.approximate.inverse import name_of
from hf_memsave.ops.fused.kernels import ACTIVATIONS, can_run, fused, is_watched, kernels
from hf_memsave.ops.fused.linear import give_sum, wants_sum
from hf_memsave.ops.op import Op


def _activation(module: nn.Module, patch: Any, x: Tensor) -> Tensor:
    if _has_no_kernel(module, None) or not can_run(x):  # it may have changed since it was patched
        return patch.stock.forward(module, x)
    act, is_biased = _kernel_of(module), wants_sum(x)

    def back(wanted: Any, dy: Tensor, x: Tensor) -> Any:
        dx, db, _ = kernels().activation_backward(dy, x, act, is_biased)
        give_sum(dx, db)
        return (dx,)

    return fused(partial(kernels().activation_forward, act=act), back, x)


def _kernel_of(module: nn.Module) -> str:
    return ACTIVATIONS.get(name_of(module) or "", "")


def _gated(module: nn.Module, patch: Any, x: Tensor) -> Tensor:
    """Run the forward of an MLP that computes ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``."""
    parts: Any = module
    gate, up = parts.gate_proj(x), parts.up_proj(x)
    is_known = not (_has_no_kernel(parts.act_fn, None) or is_watched(parts.act_fn))
    if not (is_known and gate.dtype == up.dtype and can_run(gate, up)):
        return parts.down_proj(parts.act_fn(gate) * up)
    act = _kernel_of(parts.act_fn)
    run = partial(kernels().gated_forward, act=act)
    return parts.down_proj(fused(run, lambda _, *given: kernels().gated_backward(*given, act), gate, up))


def _has_no_kernel(module: nn.Module, value: Any) -> str:
    return ACTIVATION.check(module, value) or ("" if _kernel_of(module) else "there is no kernel for it")


def _is_no_gated_mlp(module: nn.Module, value: Any) -> str:
    parts = ("gate_proj", "up_proj", "down_proj", "act_fn")
    if not all(isinstance(getattr(module, part, None), nn.Module) for part in parts):
        return f"it has not the parts {', '.join(parts)}"
    return _has_no_kernel(module.get_submodule("act_fn"), value)


FUSED_ACTIVATION = Op("fused_activation", _activation, _has_no_kernel, is_implied=True, replaces_stock=True)
FUSED_GATED = Op("fused_gated", _gated, _is_no_gated_mlp, is_implied=True, replaces_stock=True)
