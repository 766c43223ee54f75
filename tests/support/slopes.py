"""How far gradients that approximate a slope may be from the true ones: by dtype, and by what comes in."""

from __future__ import annotations

import torch
from torch import Tensor

#: The largest error of a slope that is taken from an output of this dtype: of the fit, and of the output's rounding.
SLOPE = {torch.float32: 7e-4, torch.float64: 7e-4, torch.float16: 0.012, torch.bfloat16: 0.04}
#: What is planted: a slope that is too large by this share.
PLANTED = 1.01


def assert_errs_by_slope(got: Tensor, true: Tensor, incoming: Tensor, largest: float, rounding: Tensor | float) -> None:
    """``|got - true| <= largest |incoming| + rounding``, element by element.

    Args:
        got: Gradients.
        true: The true ones, in float64.
        incoming: What the slopes are multiplied by, in float64; for a sum of several, that of their sizes.
        largest: The largest error of a slope.
        rounding: Of the products, absolute.
    """
    assert true.dtype == incoming.dtype == torch.float64
    error, room = (got.double() - true).abs(), largest * incoming.abs() + rounding
    assert (error <= room).all(), f"{float((error - room).max()):.2g} too far, {int((error > room).sum())} times"


def slope_error(got: Tensor, true: Tensor) -> float:
    """By which share ``got`` is too long along ``true``: noise without bias leaves next to nothing of it."""
    got, true = got.double().flatten(), true.double().flatten()
    return float((got - true) @ true / (true @ true))


def assert_has_slope_of(got: Tensor, true: Tensor, largest: float) -> None:
    """The error along ``true`` is at most ``largest``, and that tells :data:`PLANTED`."""
    assert largest < (PLANTED - 1) / 1.5
    assert abs(slope_error(got, true)) <= largest, slope_error(got, true)
