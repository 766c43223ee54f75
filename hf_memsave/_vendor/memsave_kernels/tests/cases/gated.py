"""Gated products of two tensors, and of the halves of one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import memsave_kernels as ours

from .case import Case, Make, gradients, leaves

TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def _two(make: Make, rows: int, columns: int) -> tuple[Any, ...]:
    return make(rows, columns, scale=2.0), make(rows, columns), make(rows, columns)


def _packed(make: Make, rows: int, columns: int) -> tuple[Any, ...]:
    return make(rows, 2 * columns, scale=2.0), None, make(rows, columns)


def _ours(g: Tensor, u: Tensor | None, dz: Tensor, act: str) -> tuple[Tensor, ...]:
    wanted = leaves(*(t for t in (g, u) if t is not None))
    z = ours.gated(wanted[0], None if u is None else wanted[1], act)
    dg, du, again = ours.gated_backward(dz, g, u, act, again=True)
    assert torch.equal(again, z)
    grads = gradients(z, wanted, dz)
    assert all(torch.equal(a, b) for a, b in zip(grads, (dg, du), strict=False))
    return z, *grads


def _eager(wide: torch.dtype, g: Tensor, u: Tensor | None, dz: Tensor, act: str) -> tuple[Tensor, ...]:
    wanted = leaves(*(t for t in (g, u) if t is not None))
    first, second = wanted if u is not None else wanted[0].chunk(2, -1)
    z = TORCH[act](first) * second
    return z, *gradients(z, wanted, dz)


BYTES = {"gated_forward_kernel": 6, "gated_backward_kernel": 12}
CASES = (
    *(Case(f"gated {act}", _two, partial(_ours, act=act), partial(_eager, act=act), BYTES) for act in TORCH),
    Case("gated silu, packed", _packed, partial(_ours, act="silu"), partial(_eager, act="silu"), BYTES),
)
