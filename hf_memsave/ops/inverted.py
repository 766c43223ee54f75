r"""``inverted``: an activation whose backward starts from its output, which the next linear keeps anyway.

Forward, stock's own, and, for an incoming gradient dy, backward::

    y = f(x)
    m = x < T                            T: where f has its minimum
    dx = dy f'(f⁻¹(y, m))                by the fit of :mod:`~hf_memsave.ops.inverse`

Kept for backward, each in x's dtype::

    eager    x, and y in the next linear
    here     y, which the next linear shares, and m in one bit an element

The same bytes as the exact x, and a bit: what it spares is making y again. It saves nothing where the next op does
not keep y by itself (a frozen linear: see ``few_bit``).

Forward is exact. The slope's largest error is 6.9e-4 from an fp32 y, and from a half-precision y that of y's own
rounding (.005 to .033, see scripts/results/inverse-derivatives.md). The slope is NaN where y is; of an x
that is infinite, or so large that stock's formula of the slope overflows to NaN, the limit, 0 or 1. Backward cannot be
differentiated again.

:func:`from_output` is the recipe for any elementwise f of one or more inputs that can be told from its output.
Source: Tempo (2022), arXiv:2210.10246, Sections 3.1 and 5.1; InvAct (2024), Eqs. 1-4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_memsave.ops.elementwise import refuse_unknown
from hf_memsave.ops.inverse import FITS, InverseFit, slope, wide
from hf_memsave.ops.once import once_differentiable
from hf_memsave.ops.op import KeptBytes
from hf_memsave.tape.codecs import pack_bits, unpack_bits


def kept_bytes(shape: tuple[int, ...], itemsize: int) -> KeptBytes:
    """The activation of ``shape`` and the linear after it."""
    n = torch.Size(shape).numel()
    return KeptBytes(2 * n * itemsize, n * itemsize + -(-n // 8))


class Recipe(NamedTuple):
    """How to differentiate y = f(x, others) from y.

    Attributes:
        gradients: Called with dy, y, m and the others; returns the gradients of x and of each other (None for none).
        indicator: m: tells from x which branch of f's inverse y belongs to. None where f has an inverse.
    """

    gradients: Callable[..., Sequence[Tensor | None]]
    indicator: Callable[[Tensor], Tensor] | None = None


def from_output(f: Callable[..., Tensor], recipe: Recipe, x: Tensor, *others: Tensor) -> Tensor:
    """``f(x, *others)``, elementwise, keeping the output, one bit an element and the others, but not x.

    Args:
        f: Stock's forward, run without autograd.
        recipe: That of f.
        x: Any shape; the output's too.
        *others: Further inputs that the gradients need.

    Returns:
        The output; what comes after should keep it too, or little is saved.
    """
    return _FromOutput.apply(f, recipe, x, *others)


class _FromOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, f: Callable[..., Tensor], recipe: Recipe, x: Tensor, *others: Tensor) -> Tensor:
        y = f(x, *others)
        bits = None if recipe.indicator is None else pack_bits(recipe.indicator(x))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y, bits, *others)
        ctx.recipe = recipe
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        y, bits, *others = ctx.saved_tensors
        m = None if bits is None else unpack_bits(bits, y.numel()).view(y.shape)
        return None, None, *ctx.recipe.gradients(dy, y, m, *others)


def fit_of(name: str) -> InverseFit:
    """The fit of an activation.

    Returns:
        The entry of :data:`~hf_memsave.ops.inverse.FITS`.

    Raises:
        PatchError: There is none.
    """
    if name not in FITS:
        refuse_unknown(name)
    return FITS[name]


def inverted(x: Tensor, name: str, forward: Callable[[Tensor], Tensor]) -> Tensor:
    """``forward(x)``, which computes the activation ``name``."""
    fit = fit_of(name)
    return from_output(forward, Recipe(partial(_gradients, fit=fit), partial(torch.lt, other=fit.turn)), x)


def _gradients(dy: Tensor, y: Tensor, left: Tensor, fit: InverseFit) -> tuple[Tensor]:
    return ((dy * slope(wide(y), left, fit, fit.ulp(y.dtype))).to(dy.dtype),)
