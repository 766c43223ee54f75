"""Norms from their output: some columns of z hold the normalized input."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import memsave_kernels as ours

from .case import Case, Make, gradients, leaves

OTHERS = (1, 4, 7)
MOVED = {"output_norm_forward_kernel": 6, "output_norm_again_kernel": 4, "output_norm_backward_kernel": 6}


def _inputs(make: Make, rows: int, columns: int, bias: bool, others: bool) -> tuple[Any, ...]:
    w, b = make(columns).abs() + 1, make(columns) * 0.1 if bias else None
    if others:
        w[list(OTHERS[:2])] = 0  # from which nothing can be told
        if b is not None:
            b[OTHERS[2]] = -16 * w[OTHERS[2]]
    return make(rows, columns, scale=2.0), w, b, make(rows, columns)


def _ours(x: Tensor, w: Tensor, b: Tensor | None, dy: Tensor) -> tuple[Tensor, ...]:
    y, z, rstd = ours.output_norm_forward(x, w, b, 1e-5, b is not None)
    again = ours.output_norm_again(z, w, b)
    args = dy, z, w, b, rstd, b is not None
    dx, dw, db = ours.output_norm_backward(*args)
    only, *nothing = ours.output_norm_backward(*args, has_dw=False)
    assert torch.equal(only, dx) and nothing == [None, None]
    return tuple(t for t in (y, again, dx, dw, db) if t is not None)


def _eager(wide: torch.dtype, x: Tensor, w: Tensor, b: Tensor | None, dy: Tensor) -> tuple[Tensor, ...]:
    wanted = leaves(*(t for t in (x, w, b) if t is not None))
    if b is None:
        y = F.rms_norm(wanted[0], w.shape, wanted[1], 1e-5)
    else:
        y = F.layer_norm(wanted[0], w.shape, wanted[1], wanted[2], 1e-5)
    return y.detach(), y.detach(), *gradients(y, wanted, dy)


def _case(name: str, bias: bool, others: bool) -> Case:
    # z's own rounding, which PyTorch does not read, is one more, and weighs (|y| + |b|) / w
    inputs = partial(_inputs, bias=bias, others=others)
    return Case(name, inputs, _ours, _eager, MOVED, roundings=4)


CASES = (
    _case("output norm, RMSNorm", bias=False, others=False),
    _case("output norm, LayerNorm", bias=True, others=False),
    _case("output norm, LayerNorm, other columns", bias=True, others=True),
    _case("output norm, RMSNorm, other columns", bias=False, others=True),
)
