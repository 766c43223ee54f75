r"""The activations with an approximate backward, and the slope of each from its output, by the side of its minimum.

Each falls from 0 to one minimum and then rises towards y = x. A new one is an entry in ACTIVATIONS, its class in
``arch/sites.py``, and one run of ``scripts/bench/fit_inverse.py``.

With y_min = f(T) the minimum, and P a polynomial of each side and each activation::

    s = √(y - y_min)
    f'(f⁻¹(y)) ≈ s y P_left(s)      x < T     (0 at both ends of the side, s = 0 and y = 0)
                 s P_right(s)       x >= T, y <= cut
                 1                  x >= T, y > cut

f is quadratic in x at its minimum, so s is smooth in x there, and f' in s; y_min is split into an fp32 number and the
rest, so y - y_min is exact near it. In the one cell of y's grid that holds y_min, the slopes of all x that round to y
reach about √ulp: y is taken a tenth of an ulp above y_min at least, nearer to their middle.

Source: InvAct (2024), Eqs. 5-9, with other functions: theirs reach 1.9e-2 (GELU) and 2.9e-3 (SiLU).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import NewGELUActivation, QuickGELUActivation

from hf_memsave.arch.sites import ACTIVATIONS as CLASSES
from hf_memsave.arch.sites import path_of

#: Name -> stock's own expression.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "new_gelu": NewGELUActivation().forward,
    "silu": F.silu,
    "quick_gelu": QuickGELUActivation().forward,
}


def name_of(module: nn.Module) -> str | None:
    """Return the name in :data:`ACTIVATIONS` of what ``module``, patched or not, computes; None if it has none."""
    name = CLASSES.get(path_of(type(module)))
    return "gelu_tanh" if name == "gelu" and getattr(module, "approximate", "none") == "tanh" else name


class InverseFit(NamedTuple):
    """The fit of one activation, with the coefficients of P_left and P_right, the one of s⁰ first."""

    turn: float  # T
    minimum: Sequence[float]  # f(T), as an fp32 number and the rest
    cut: float  # the largest y that ``right`` is for
    left: Sequence[float]
    right: Sequence[float]

    def ulp(self, dtype: torch.dtype) -> float:
        """Return the distance between neighbouring numbers of ``dtype`` at the minimum."""
        return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(-self.minimum[0]))


_TEXT = files(__package__).joinpath("inverse_fits.json").read_text(encoding="utf-8")
#: Fits of all activations, by name, written by ``scripts/bench/fit_inverse.py``.
FITS = {name: InverseFit(**fit) for name, fit in json.loads(_TEXT).items()}


def slope(y: Tensor, left: Tensor, fit: InverseFit, ulp: float) -> Tensor:
    """Compute f'(f⁻¹(y)) of y in fp32 or fp64, rounded to a grid of ``ulp`` at the minimum; ``left`` is x < T."""
    high, low = fit.minimum
    s = ((y - high) - low).clamp(ulp / 10, fit.cut - high).sqrt()
    near = s * torch.where(left, y * _polynomial(fit.left, s), _polynomial(fit.right, s))
    return near.masked_fill_(~left & (y > fit.cut), 1.0)


def wide(y: Tensor) -> Tensor:
    """Convert ``y`` to the dtype in which its slope is computed: fp32 at least."""
    return y.to(torch.promote_types(y.dtype, torch.float32))


def _polynomial(coefficients: Sequence[float], s: Tensor) -> Tensor:
    total = torch.full_like(s, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total.mul_(s).add_(coefficient)
    return total
