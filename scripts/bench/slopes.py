"""Slopes of activations: the truth in float64, what the ops use, the best there is from a rounded output, InvAct's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fit_inverse import slopes
from hf_memsave.ops.approximate.inverse import ACTIVATIONS, FITS, slope, wide
from hf_memsave.ops.approximate.inverted import decode, encode

HALVES = (torch.bfloat16, torch.float16)


def every(dtype: torch.dtype) -> Tensor:
    """Every finite number of a 16-bit dtype."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return x[x.isfinite()]


def dense() -> Tensor:
    """An fp32 grid on [-100, 100], finer where activations have their minima."""
    return torch.cat([torch.linspace(-100, 100, 1_000_001), torch.linspace(-2, 0, 200_001)])


def true_slope(name: str, x: Tensor) -> Tensor:
    """f'(x) in float64, by autograd."""
    return torch.from_numpy(slopes(ACTIVATIONS[name], x.detach().double().cpu().numpy())).to(x.device)


def slope_from_output(name: str, x: Tensor) -> Tensor:
    """What ``inverted`` multiplies dy by."""
    fit, y = FITS[name], ACTIVATIONS[name](x)
    return slope(wide(y), x < fit.turn, fit, fit.ulp(y.dtype))


def slope_from_precision_bit(name: str, x: Tensor) -> Tensor:
    """What ``precision_bit`` multiplies dy by."""
    fit, y = FITS[name], ACTIVATIONS[name](x)
    return slope(*decode(encode(y, x < fit.turn)), fit, 2 * fit.ulp(y.dtype))


def slope_of_exact_inverse(name: str, x: Tensor) -> Tensor:
    """f'(f⁻¹(y)) for the forward's own y, rounded to x's dtype, by bisection in float64: no method is told more."""
    f, fit = ACTIVATIONS[name], FITS[name]
    left = x < fit.turn
    y = f(x).double().clamp(sum(fit.minimum), 1e300)  # bf16's gelu overflows in its last binade
    low = torch.where(left, -60.0, fit.turn).double()
    high = torch.where(left, fit.turn, y + 1)
    for _ in range(100):
        middle = (low + high) / 2
        is_below = (f(middle) > y) == left
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    return true_slope(name, (low + high) / 2)


def invact(name: str, x: Tensor) -> Tensor:
    """InvAct's own slope of "gelu" or "silu": Eqs. 5-9 and A.2, whose two SiLU lists are swapped."""
    turn, minimum, left, right = _INVACT[name]
    y = getattr(F, name)(x)
    t = (y - minimum).clamp_min(0)
    c = right
    q_right = 1 + (c[0] + c[1] * t.sqrt() + c[2] * t) * torch.exp(c[3] * (c[4] - t) ** 3)
    c = left
    if name == "gelu":
        inner = (c[3] * y * y + (c[4] * y + c[5]).abs() + c[6]).abs() + c[7]
        q_left = c[0] * (y + c[1]).clamp_min(0).sqrt() * (2 * y + c[2] * (-y).clamp_min(0).sqrt()) * inner
        return torch.where(x < turn, q_left, q_right)
    q_left = c[0] + c[1] * t.sqrt() + c[2] * t + c[3] * t**2
    return torch.where(x < turn, q_left, q_right) * (1 - y) + y


#: T, f(T), the coefficients c_0, c_1, ... of q_left and of q_right.
_INVACT = {
    "gelu": (
        -0.7517915247,
        -0.1699712075,
        (1.6311011311381, 0.169972466666667, -0.06261728, 1.2947087, 1.98055565, 0.22730362, -0.038978495, 1.3295193),
        (-1.383717971214795, 1.558420184350027, 0.04404574801811, 0.032146736769376, -2.119885089843949),
    ),
    "silu": (
        -1.2784645428,
        -0.2784645428,
        (0.217177007595768, -0.507684370508263, 0.079631397669175, 0.357494204859375),
        (-1.31085640213098, 0.848589647031652, -0.162990512595109, 0.002696163985044, -5.770613302664509),
    ),
}
