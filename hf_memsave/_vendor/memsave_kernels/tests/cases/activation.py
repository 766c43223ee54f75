"""Activations, with the bias gradient of the linear before."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import memsave_kernels as ours

from .case import Case, Make, gradients, leaves
from .gated import TORCH


def _inputs(make: Make, rows: int, columns: int) -> tuple[Any, ...]:
    return make(rows, columns, scale=2.0), make(rows, columns)


def _ours(x: Tensor, dy: Tensor, act: str) -> tuple[Tensor, ...]:
    (x,) = leaves(x)
    y = ours.activate(x, act)
    dx, db, again = ours.activation_backward(dy, x.detach(), act, has_db=True, again=True)
    assert torch.equal(again, y) and torch.equal(*gradients(y, (x,), dy), dx)
    return y, dx, db.to(x.dtype)


def _eager(wide: torch.dtype, x: Tensor, dy: Tensor, act: str) -> tuple[Tensor, ...]:
    (x,) = leaves(x)
    y = TORCH[act](x)
    (dx,) = gradients(y, (x,), dy)
    return y, dx, dx.sum(0)


BYTES = {"activation_forward_kernel": 4, "activation_backward_kernel": 8}
CASES = tuple(
    Case(f"activation {act}", _inputs, partial(_ours, act=act), partial(_eager, act=act), BYTES) for act in TORCH
)
