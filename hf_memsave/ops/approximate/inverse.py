r"""The slope of an activation from its output: f'(f⁻¹(y)), on either side of its minimum.

With y_min = f(T) the minimum, and P a polynomial of each side and each activation::

    s = √(y - y_min)
    f'(f⁻¹(y)) ≈ s y P_left(s)      x < T     (y P_left: 0 at both ends of the side, s = 0 and y = 0)
                 s P_right(s)       x >= T, y <= cut
                 1                  x >= T, y > cut

f is quadratic in x at its minimum, so s is smooth in x there, and f' in s. y - y_min is exact near the minimum: y_min
is split into an fp32 number and the rest. What is left is the rounding of y itself. In the one cell of y's grid that
holds y_min, a y rounded to (or below) y_min would give the slope 0, where the slopes of all x that round to it reach
about √ulp: y is taken a tenth of an ulp above y_min at least, nearer to the middle of those slopes.

Source: InvAct (2024), Eqs. 5-9, with other functions: theirs reach 1.9e-2 (GELU) and 2.9e-3 (SiLU).
"""

from __future__ import annotations

import json
import math
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from torch import Tensor


class InverseFit(NamedTuple):
    """One activation's fit.

    Attributes:
        turn: T, where the minimum is.
        minimum: f(T), as an fp32 number and the rest.
        cut: The largest y that ``right`` is for.
        left: Coefficients of P_left, that of s⁰ first.
        right: Those of P_right.
    """

    turn: float
    minimum: tuple[float, float]
    cut: float
    left: tuple[float, ...]
    right: tuple[float, ...]

    def ulp(self, dtype: torch.dtype) -> float:
        """The distance of two neighbours in ``dtype`` at the minimum."""
        return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(-self.minimum[0]))


def _read(fit: dict[str, Any]) -> InverseFit:
    values: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in fit.items()}
    return InverseFit(**values)


_TEXT = files(__package__).joinpath("inverse_fits.json").read_text(encoding="utf-8")
#: Of every activation, by name: written by ``scripts/bench/fit_inverse.py``.
FITS = {name: _read(fit) for name, fit in json.loads(_TEXT).items()}


def slope(y: Tensor, left: Tensor, fit: InverseFit, ulp: float) -> Tensor:
    """f'(f⁻¹(y)) of y in fp32 or fp64, rounded to a grid of ``ulp`` at the minimum; ``left`` says where x < T."""
    high, low = fit.minimum
    s = ((y - high) - low).clamp(ulp / 10, fit.cut - high).sqrt()
    near = s * torch.where(left, y * _polynomial(fit.left, s), _polynomial(fit.right, s))
    return near.masked_fill_(~left & (y > fit.cut), 1.0)


def wide(y: Tensor) -> Tensor:
    """``y`` in the dtype to compute its slope in: fp32 at least."""
    return y.to(torch.promote_types(y.dtype, torch.float32))


def _polynomial(coefficients: tuple[float, ...], s: Tensor) -> Tensor:
    total = torch.full_like(s, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total.mul_(s).add_(coefficient)
    return total
