"""Conversions that autocast makes inside a product, made before it: so that they have records, if a tape is laid."""

from __future__ import annotations

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is on where ``x`` lies."""
    return torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)


def autocast_low(x: Tensor) -> Tensor:
    """``x`` as autocast would hand it to a matrix product."""
    if not is_autocast(x) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))
