r"""Backward of a LayerNorm or RMSNorm from its output.

With y = w x̂ + b (RMSNorm has no b and no mean(g)), means over the N elements of a row::

    x̂ = (y - b) / w                of columns that are listed: (x - mean) rstd
    g = w dy
    dx = rstd (g - mean(g) - x̂ mean(g x̂))
    dw = Σ dy x̂        db = Σ dy

Bytes an element in half precision: 6. Source: Tempo (2022), arXiv:2210.10246, Section 3.2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import ceil_div, dense, launch, like, row_tile, workers
from ._ops import define


@triton.jit
def output_norm_backward_kernel(
    dy_ptr, y_ptr, w_ptr, b_ptr, rstd_ptr, place_ptr, x_ptr, mean_ptr, dx_ptr, dw_ptr, db_ptr, rows, kept,
    N: tl.constexpr, CENTRED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient dx, and this program's part of dw and db unless their pointers are None."""
    column = tl.arange(0, COLUMNS)[None, :]
    w = tl.load(w_ptr + column, mask=column < N, other=1.0).to(tl.float32)
    b = tl.zeros([1, COLUMNS], dtype=tl.float32)
    if b_ptr is not None:
        b = tl.load(b_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    place = tl.full([1, COLUMNS], -1, dtype=tl.int32)
    if place_ptr is not None:
        place = tl.load(place_ptr + column, mask=column < N, other=-1)
    dw = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    db = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)[:, None].to(tl.int64)
        is_row, inside = row < rows, (row < rows) & (column < N)
        at = row * N + column
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=is_row, other=0.0)
        normed = (tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32) - b) / w
        if place_ptr is not None:
            x = tl.load(x_ptr + row * kept + place, mask=inside & (place >= 0), other=0.0).to(tl.float32)
            if mean_ptr is not None:
                x -= tl.load(mean_ptr + row, mask=is_row, other=0.0)
            normed = tl.where(place >= 0, x * rstd, normed)
        g = dy * w
        dx = g - normed * (tl.sum(g * normed, axis=1, keep_dims=True) / N)
        if CENTRED:
            dx -= tl.sum(g, axis=1, keep_dims=True) / N
        tl.store(dx_ptr + at, rstd * dx, mask=inside)
        if dw_ptr is not None:
            dw += dy * normed
        if db_ptr is not None:
            db += dy
    at = tl.program_id(0).to(tl.int64) * N + column
    if dw_ptr is not None:
        tl.store(dw_ptr + at, tl.sum(dw, axis=0, keep_dims=True), mask=column < N)
    if db_ptr is not None:
        tl.store(db_ptr + at, tl.sum(db, axis=0, keep_dims=True), mask=column < N)


def _backward(
    dy: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, rstd: Tensor, centred: bool,
    place: Tensor | None, x: Tensor | None, mean: Tensor | None, has_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx, dw, db = _backward_fake(dy, y, weight, bias, rstd, centred, place, x, mean, has_dw)
    rows, columns, warps = row_tile(y.shape[-1], 8)
    tiles = ceil_div(rstd.numel(), rows)
    programs = workers(y, tiles, warps) if has_dw else tiles
    dw_part, db_part = (
        y.new_empty(programs, y.shape[-1], dtype=torch.float32) if wanted else None
        for wanted in (has_dw, has_dw and bias is not None)
    )
    launch(
        output_norm_backward_kernel, (programs,),
        (*dense(dy, y, weight, bias, rstd, place, x, mean), dx, dw_part, db_part, rstd.numel(),
         0 if x is None else x.shape[-1]),
        {"N": y.shape[-1], "CENTRED": centred, "ROWS": rows, "COLUMNS": columns}, warps,
    )  # fmt: skip
    dw, db = (out if part is None else part.sum(0).to(weight.dtype) for out, part in ((dw, dw_part), (db, db_part)))
    return dx, dw, db


def _backward_fake(
    dy: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, rstd: Tensor, centred: bool,
    place: Tensor | None, x: Tensor | None, mean: Tensor | None, has_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dw, db = (weight.new_empty(weight.shape if wanted else 0) for wanted in (has_dw, has_dw and bias is not None))
    return like(y), dw, db


_op = define(
    "output_norm_backward(Tensor dy, Tensor y, Tensor weight, Tensor? bias, Tensor rstd, bool centred, Tensor? place, "
    "Tensor? x, Tensor? mean, bool has_dw) -> (Tensor, Tensor, Tensor)",
    _backward, _backward_fake,
)  # fmt: skip


def output_norm_backward(
    dy: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, rstd: Tensor, centred: bool, *,
    place: Tensor | None = None, x: Tensor | None = None, mean: Tensor | None = None, has_dw: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of a norm from its output.

    Args:
        dy: ``[*, N]``.
        y: ``[*, N]``, float32, bfloat16 or float16.
        weight: ``[N]``; not 0, but for columns that ``place`` lists.
        bias: ``[N]``, or None.
        rstd: ``[*]``, float32.
        centred: Whether it is a LayerNorm.
        place: int32 ``[N]``: which column of ``x`` a column is, or -1 if it is none; None for none at all.
        x: ``[*, k]``: the norm's input in the listed columns.
        mean: ``[*]``, float32: of the rows, for a LayerNorm with listed columns.
        has_dw: Whether the gradients of weight and bias are wanted.

    Returns:
        dx like y, dw and db ``[N]`` in weight's dtype, None for what is not there or not wanted.
    """
    dx, dw, db = _op(dy, y, weight, bias, rstd, centred, place, x, mean, has_dw)
    return dx, dw if has_dw else None, db if has_dw and bias is not None else None
