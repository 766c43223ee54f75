"""Rotary embedding of four heads, whole and of a part of each."""

from typing import Any

import torch
from torch import Tensor

import memsave_kernels as ours

from .case import Case, Make, gradients, leaves


def _inputs(make: Make, rows: int, columns: int) -> tuple[Any, ...]:
    angles = make(1, rows, columns // 2 * 2, dtype=torch.float32, scale=3.0)
    x = make(1, rows, 4, columns).transpose(1, 2)  # as attention lays it out
    return x, angles.cos().to(x.dtype), angles.sin().to(x.dtype), make(1, 4, rows, columns)


def _ours(x: Tensor, cos: Tensor, sin: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    (x,) = leaves(x)
    y = ours.rotary(x, cos, sin)
    assert y.stride() == x.stride()
    return y, *gradients(y, (x,), dy)


def _eager(wide: torch.dtype, x: Tensor, cos: Tensor, sin: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    (x,) = leaves(x)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    y = torch.cat([turned * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None], rest], -1)
    return y, *gradients(y, (x,), dy)


#: Four heads of 4 bytes an element each, and the cosines and sines, 2 each.
CASES = (Case("rotary", _inputs, _ours, _eager, {"rotary_kernel": 4 * 4 + 2 * 2}),)
