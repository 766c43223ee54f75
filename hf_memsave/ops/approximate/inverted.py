r"""``inverted``: an activation whose backward starts from its output, which the next linear keeps anyway.

Forward, stock's own, and, for an incoming gradient dy, backward::

    y = f(x)
    m = x < T                            T: where f has its minimum
    dx = dy f'(f⁻¹(y, m))                by the fit of :mod:`~hf_memsave.ops.approximate.inverse`

``precision_bit`` puts m into the lowest bit of the output; with n the bits of f(x) read as an integer::

    n' = (n & ~1) | m                    y = n' read as a number
    dx = dy f'(f⁻¹(ȳ, n' & 1))           ȳ: midway between n' & ~1 and n' | 1, the two numbers that became y

Kept for backward, each in x's dtype::

    eager            x, and y in the next linear
    inverted         y, which the next linear shares, and m in one bit an element
    precision_bit    y, which the next linear shares

These are the exact op's bytes; what it spares is recomputing y. Before a frozen linear it saves nothing: see
``few_bit``. ``inverted``'s forward is exact, but for kernels', which compute in fp32 and round once. ``precision_bit``
changes y by at most one unit in the last place; m is 1 on the left, where y is at most 0: on the right it would turn
+inf into NaN. The slope's largest error is 6.9e-4 from an fp32 y, and from a half-precision y that of y's own rounding
(.005 to .033), or 1.5 times that. It is NaN where y is; of an x that is infinite, or so large that stock's formula
overflows to NaN, the limit, 0 or 1. Once differentiable.
Source: Tempo (2022), arXiv:2210.10246, Sections 3.1 and 5.1; InvAct (2024), Eqs. 1-4 and Section 2.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_memsave.ops.approximate.inverse import FITS, InverseFit, slope, wide
from hf_memsave.ops.fused.codes import are_wanted
from hf_memsave.ops.fused.kernels import ACTIVATIONS, kernels
from hf_memsave.ops.op import once_differentiable
from hf_memsave.tape.bits import pack_bits, unpack_bits
from hf_memsave.tape.private import no_modes

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def inverted(x: Tensor, name: str, forward: Callable[[Tensor], Tensor], in_y: bool = False) -> Tensor:
    """Run ``forward(x)``, the activation ``name``; ``in_y``: keep m in the output, as ``precision_bit``."""
    kernel = ACTIVATIONS.get(name) if are_wanted(x) else None
    with no_modes() if kernel else contextlib.nullcontext():
        return _Inverted.apply(x, forward, FITS[name], in_y, kernel)


def encode(y: Tensor, m: Tensor) -> Tensor:
    """Return ``y`` with ``m`` in its lowest bit."""
    n = y.view(_INTEGERS[y.itemsize])
    return ((n & ~1) | m.to(n.dtype)).view(y.dtype)


def decode(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the middle of the two numbers that :func:`encode` turns into ``y``, in fp32 at least; and ``m``."""
    n = y.view(_INTEGERS[y.itemsize])
    low, high = wide((n & ~1).view(y.dtype)), wide((n | 1).view(y.dtype))
    return torch.where(low.isfinite(), low + (high - low) / 2, low), (n & 1).bool()


class _Inverted(torch.autograd.Function):
    """The activation of :func:`inverted`; ``kernel`` is its name among kernels, None where they do not run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, fit: InverseFit, in_y: bool, kernel: str | None) -> Tensor:
        bits = None
        if kernel is not None:
            y, bits = kernels().inverted_forward(x, kernel, fit.turn, in_y)
        elif in_y:
            y = encode(forward(x), x < fit.turn)
        else:
            y, bits = forward(x), pack_bits(x < fit.turn)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y, bits)
        ctx.fit, ctx.is_fused = fit, kernel is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        y, bits = ctx.saved_tensors
        if ctx.is_fused:
            dx = kernels().inverted_backward(dy, y, bits, ctx.fit)
        else:
            ulp = ctx.fit.ulp(y.dtype)
            if bits is None:
                middle, left = decode(y)
                dx = dy * slope(middle, left, ctx.fit, 2 * ulp)
            else:
                dx = dy * slope(wide(y), unpack_bits(bits, y.numel()).view(y.shape), ctx.fit, ulp)
        return dx.to(dy.dtype), None, None, None, None
