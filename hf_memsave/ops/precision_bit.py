r"""``precision_bit``: ``inverted`` whose indicator is the lowest bit of the output itself.

With n the bits of f(x) read as an integer, and m = (x < T)::

    n' = (n & ~1) | m                    y = n' read as a number
    dx = dy f'(f⁻¹(ȳ, n' & 1))           ȳ: midway between n' & ~1 and n' | 1, the two numbers that became y

Kept for backward::

    eager    x, and y in the next linear
    here     y, which the next linear shares

Forward changes y by at most one unit in the last place, and only where gradients are recorded. m is 1 on the left,
where y is at most 0: on the right it would turn +inf into NaN. Read as an integer, it survives where subnormal numbers
are flushed to zero: -0 with m is one. The slope's largest error is 6.9e-4 from an fp32 y, and from a half-precision y
at most 1.5 times that of y's own rounding (see scripts/results/inverse-derivatives.md); of what is not finite or
overflows, that of ``inverted``. Backward cannot be differentiated again.
Source: InvAct (2024), Section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_memsave.ops.inverse import InverseFit, slope, wide
from hf_memsave.ops.inverted import fit_of
from hf_memsave.ops.once import once_differentiable
from hf_memsave.ops.op import KeptBytes

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def kept_bytes(shape: tuple[int, ...], itemsize: int) -> KeptBytes:
    """The activation of ``shape`` and the linear after it."""
    n = torch.Size(shape).numel() * itemsize
    return KeptBytes(2 * n, n)


def encode(y: Tensor, m: Tensor) -> Tensor:
    """``y`` with ``m`` in its lowest bit."""
    n = y.view(_INTEGERS[y.itemsize])
    return ((n & ~1) | m.to(n.dtype)).view(y.dtype)


def decode(y: Tensor) -> tuple[Tensor, Tensor]:
    """What :func:`encode` made: the middle of the two numbers it may have been, in fp32 at least; and ``m``."""
    n = y.view(_INTEGERS[y.itemsize])
    low, high = wide((n & ~1).view(y.dtype)), wide((n | 1).view(y.dtype))
    return torch.where(low.isfinite(), low + (high - low) / 2, low), (n & 1).bool()


class _PrecisionBit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], fit: InverseFit) -> Tensor:
        y = encode(forward(x), x < fit.turn)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y)
        ctx.fit = fit
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        middle, left = decode(y)
        return (dy * slope(middle, left, ctx.fit, 2 * ctx.fit.ulp(y.dtype))).to(dy.dtype), None, None


def precision_bit(x: Tensor, name: str, forward: Callable[[Tensor], Tensor]) -> Tensor:
    """``forward(x)``, which computes the activation ``name``, to within one unit in the last place."""
    return _PrecisionBit.apply(x, forward, fit_of(name))
