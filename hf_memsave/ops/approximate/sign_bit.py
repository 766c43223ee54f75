r"""``sign_bit``: an activation and the linear after it, with the indicator in the sign of what they keep.

Forward, and, for an incoming gradient dz, backward, with m = (x < T)::

    y = f(x)            k = y - C, its sign set to m          C: below f's minimum, so y - C is positive
    z = y Wᵀ + b
    ŷ = |k| + C
    db = Σ dz           dW = dzᵀ ŷ              dx = dz W f'(f⁻¹(ŷ, m))

Kept for backward, in x's dtype: k, where eager keeps x and y. Forward is exact: the product takes y itself. With ε the
machine epsilon of x's dtype::

    |ŷ - y| <= ε (|y| + |C|)             |dW - dW_exact| <= ε Σ |dz| (|y| + |C|), before the product's own rounding

The slope's largest error is that of ``inverted``. Once differentiable. Source: InvAct (2024), Section 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_memsave.arch.sites import path_of
from hf_memsave.errors import PatchError
from hf_memsave.ops.approximate.inverse import ACTIVATIONS, FITS, InverseFit, name_of, slope, wide
from hf_memsave.ops.fused.kernels import is_watched
from hf_memsave.ops.op import autocast_low, once_differentiable


def offset(fit: InverseFit) -> float:
    """Return C: a multiple of 1/64, exact in every dtype, at least 1/512 (two bf16 roundings) below the minimum."""
    return math.floor(64 * (fit.minimum[0] - 2**-9)) / 64


def sign_bit(
    x: Tensor, name: str, forward: Callable[[Tensor], Tensor], weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Run ``F.linear(forward(x), weight, bias)`` of x ``[*, in]``, where ``forward`` is the activation ``name``."""
    return _SignBit.apply(x, forward, FITS[name], autocast_low(weight), autocast_low(bias))


class SignBit(nn.Module):
    """``nn.Sequential(activation, linear)`` as one module, by :func:`sign_bit`, with both as its children.

    Once the activation has no fit, or the linear is replaced (an adapter, quantized) or has hooks, both run as stock.

    Raises:
        PatchError: The activation has no fit, or works in place.
    """

    def __init__(self, activation: nn.Module, linear: nn.Linear) -> None:
        super().__init__()
        if name_of(activation) is None or getattr(activation, "inplace", False):
            raise PatchError(
                f"SignBit expected one of {', '.join(ACTIVATIONS)}, with inplace=False, got {activation}. Use "
                "nn.Sequential for another one."
            )
        self.activation, self.linear = activation, linear

    def forward(self, input: Tensor) -> Tensor:
        """Return ``linear(activation(input))``."""
        linear: Any = self.linear
        # A linear whose call is the product alone; patched classes have stock's names.
        is_plain = path_of(type(linear)) == "torch.nn.modules.linear.Linear" and not is_watched(linear)
        if (name := name_of(self.activation)) is None or not is_plain:
            return linear(self.activation(input))
        return sign_bit(input, name, self.activation, linear.weight, linear.bias)


class _SignBit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, fit: InverseFit, weight: Tensor, bias: Tensor | None) -> Tensor:
        left = x < fit.turn
        y = forward(x)
        k = y - offset(fit)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(torch.where(left, -k, k), weight)
        ctx.fit = fit
        return F.linear(y.to(weight.dtype), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, Tensor | None]:
        k, weight = ctx.saved_tensors
        y = wide(k).abs() + offset(ctx.fit)
        flat = dz.reshape(-1, dz.shape[-1])
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = ((dz @ weight) * slope(y, k.signbit(), ctx.fit, ctx.fit.ulp(k.dtype))).to(k.dtype)
        if ctx.needs_input_grad[3]:
            dw = flat.T @ y.to(dz.dtype).reshape(-1, y.shape[-1])
        if ctx.needs_input_grad[4]:
            db = flat.sum(0)
        return dx, None, None, dw, db
