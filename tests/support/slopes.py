"""How far gradients that approximate a slope may be from the true ones: by dtype, and by what comes in."""

import torch

#: The largest error of a slope that is taken from an output of this dtype: of the fit, and of the output's rounding.
SLOPE = {torch.float32: 7e-4, torch.float64: 7e-4, torch.float16: 0.012, torch.bfloat16: 0.04}
#: What is planted: a slope that is too large by this share.
PLANTED = 1.01


def assert_errs_by_slope(got, true, incoming, largest, rounding):
    """``|got - true| <= largest |incoming| + rounding``, element by element; all but ``got`` in float64."""
    assert true.dtype == incoming.dtype == torch.float64
    error, room = (got.double() - true).abs(), largest * incoming.abs() + rounding
    assert (error <= room).all(), f"{float((error - room).max()):.2g} too far, {int((error > room).sum())} times"


def assert_has_slope_of(got, true, largest):
    """``got`` is too long along ``true`` by at most ``largest``, which tells :data:`PLANTED`; noise leaves little."""
    assert largest < (PLANTED - 1) / 1.5
    got, true = got.double().flatten(), true.double().flatten()
    error = float((got - true) @ true / (true @ true))
    assert abs(error) <= largest, error
