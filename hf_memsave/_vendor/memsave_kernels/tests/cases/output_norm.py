"""Norms from their output: some columns keep their input."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import memsave_kernels as ours

from .case import Case, Make, gradients, leaves

KEPT = (1, 4)


def _inputs(make: Make, rows: int, columns: int, bias: bool, kept: bool) -> tuple[Any, ...]:
    w, b = make(columns).abs() + 1, make(columns) * 0.1 if bias else None
    if kept:
        w[list(KEPT)] = 0
    return make(rows, columns, scale=2.0), w, b, make(rows, columns)


def _ours(x: Tensor, w: Tensor, b: Tensor | None, dy: Tensor, kept: bool) -> tuple[Tensor, ...]:
    if b is None:
        y, rstd = ours.rms_norm_forward(x, w, 1e-6, "torch")
        mean = None
    else:
        _, y, _, mean, rstd = ours.dropout_norm_forward(x, None, w, b)
    place = inputs = None
    if kept:
        place = torch.full(w.shape, -1, dtype=torch.int32, device=x.device)
        place[list(KEPT)] = torch.arange(len(KEPT), dtype=torch.int32, device=x.device)
        inputs = x[:, list(KEPT)].contiguous()
    args = dy, y, w, b, rstd, b is not None
    dx, dw, db = ours.output_norm_backward(*args, place=place, x=inputs, mean=mean if kept else None)
    only, *nothing = ours.output_norm_backward(*args, place=place, x=inputs, mean=mean if kept else None, has_dw=False)
    assert torch.equal(only, dx) and nothing == [None, None]
    return tuple(t for t in (dx, dw, db, mean) if t is not None)


def _eager(wide: torch.dtype, x: Tensor, w: Tensor, b: Tensor | None, dy: Tensor, kept: bool) -> tuple[Tensor, ...]:
    wanted = leaves(*(t for t in (x, w, b) if t is not None))
    if b is None:
        y = F.rms_norm(wanted[0], w.shape, wanted[1], 1e-6)
    else:
        y = F.layer_norm(wanted[0], w.shape, wanted[1], wanted[2], 1e-5)
    return *gradients(y, wanted, dy), *([] if b is None else [x.to(wide).mean(-1)])


def _case(name: str, bias: bool, kept: bool) -> Case:
    # y's own rounding, which PyTorch does not read, is one more, and weighs (|y| + |b|) / w
    inputs = partial(_inputs, bias=bias, kept=kept)
    return Case(name, inputs, partial(_ours, kept=kept), partial(_eager, kept=kept), {}, roundings=4)


CASES = (
    _case("output norm, RMSNorm", bias=False, kept=False),
    _case("output norm, LayerNorm", bias=True, kept=False),
    _case("output norm, LayerNorm, kept columns", bias=True, kept=True),
    _case("output norm, RMSNorm, kept columns", bias=False, kept=True),
)
