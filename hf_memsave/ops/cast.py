"""Conversions that autocast makes inside a product, made before it: so that they have records, if a tape is laid."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_memsave.device import is_autocast


def autocast_low(x: Tensor) -> Tensor:
    """``x`` as autocast would hand it to a matrix product."""
    if not is_autocast(x) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))
