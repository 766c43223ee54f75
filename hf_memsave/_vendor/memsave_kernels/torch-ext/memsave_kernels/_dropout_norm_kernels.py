"""The kernels of :mod:`memsave_kernels.dropout_norm`; the formulas are there."""

import triton
import triton.language as tl

from ._dropout import dropped_out


@triton.jit
def _vectors(w_ptr, b_ptr, column, N: tl.constexpr):
    """w, and b or 0."""
    w = tl.load(w_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    if b_ptr is None:
        return w, tl.zeros_like(w)
    else:
        return w, tl.load(b_ptr + column, mask=column < N, other=0.0).to(tl.float32)


@triton.jit
def _affine(h, mean, rstd, w, b):
    """y: the same in forward, again and backward."""
    return (h - mean) * rstd * w + b


@triton.jit(do_not_specialize=["seed", "threshold"])
def dropout_norm_forward_kernel(
    x_ptr, residual_ptr, w_ptr, b_ptr, h_ptr, y_ptr, low_ptr, mean_ptr, rstd_ptr,
    seed: tl.int64, threshold: tl.int64, rows, eps,
    N: tl.constexpr, DROPS: tl.constexpr, AGAIN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sum h, y, y in the other dtype, mean and rstd; AGAIN reads the last two."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    is_row, inside = row < rows, (row < rows) & (column < N)
    at = row * N + column
    h = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if DROPS:
        h = dropped_out(h, seed, threshold, row, 0, ROWS, COLUMNS)
    if residual_ptr is not None:
        h += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if h_ptr is not None:
        stored = h.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + at, stored, mask=inside)
        h = stored.to(tl.float32)
    if AGAIN:
        mean = tl.load(mean_ptr + row, mask=is_row, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=is_row, other=0.0)
    else:
        mean = tl.sum(h, axis=1, keep_dims=True) / N
        centred = tl.where(inside, h - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / N + eps)
        tl.store(mean_ptr + row, mean, mask=is_row)
        tl.store(rstd_ptr + row, rstd, mask=is_row)
    w, b = _vectors(w_ptr, b_ptr, column, N)
    y = _affine(h, mean, rstd, w, b)
    tl.store(y_ptr + at, y, mask=inside)
    if low_ptr is not None:
        tl.store(low_ptr + at, y, mask=inside)


@triton.jit(do_not_specialize=["seed", "threshold"])
def dropout_sum_kernel(
    x_ptr, residual_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, h_ptr, seed: tl.int64, threshold: tl.int64, rows,
    N: tl.constexpr, DROPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sum h of x and the residual, or of x and the norm of the residual if w_ptr is not None."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < N)
    at = row * N + column
    h = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if DROPS:
        h = dropped_out(h, seed, threshold, row, 0, ROWS, COLUMNS)
    residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if w_ptr is not None:
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        w, b = _vectors(w_ptr, b_ptr, column, N)
        residual = _affine(residual, mean, rstd, w, b).to(h_ptr.dtype.element_ty).to(tl.float32)
    tl.store(h_ptr + at, h + residual, mask=inside)


@triton.jit(do_not_specialize=["seed", "threshold"])
def dropout_norm_backward_kernel(
    dy_ptr, dlow_ptr, dh_ptr, h_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr,
    dx_ptr, dresidual_ptr, dw_ptr, db_ptr, y_ptr, low_ptr, seed: tl.int64, threshold: tl.int64, rows,
    N: tl.constexpr, DROPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradients whose pointers are not None, this program's part of dw and db, and y again likewise."""
    column = tl.arange(0, COLUMNS)[None, :]
    w, b = _vectors(w_ptr, b_ptr, column, N)
    dw = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    db = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)[:, None].to(tl.int64)
        is_row, inside = row < rows, (row < rows) & (column < N)
        at = row * N + column
        h = tl.load(h_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if dlow_ptr is not None:
            dy += tl.load(dlow_ptr + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=is_row, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=is_row, other=0.0)
        if y_ptr is not None:
            tl.store(y_ptr + at, _affine(h, mean, rstd, w, b), mask=inside)
        if low_ptr is not None:
            tl.store(low_ptr + at, _affine(h, mean, rstd, w, b), mask=inside)
        normed = (h - mean) * rstd
        if dw_ptr is not None:
            dw += dy * normed
        if db_ptr is not None:
            db += dy
        g = dy * w
        share = tl.sum(g * normed, axis=1, keep_dims=True) / N
        dh = rstd * (g - tl.sum(g, axis=1, keep_dims=True) / N - normed * share)
        if dh_ptr is not None:
            dh += tl.load(dh_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + at, dh, mask=inside)
        if dx_ptr is not None:
            if DROPS:
                dh = dropped_out(dh, seed, threshold, row, 0, ROWS, COLUMNS)
            tl.store(dx_ptr + at, dh, mask=inside)
    if dw_ptr is not None:
        at = tl.program_id(0).to(tl.int64) * N + column
        tl.store(dw_ptr + at, tl.sum(dw, axis=0, keep_dims=True), mask=column < N)
    if db_ptr is not None:
        at = tl.program_id(0).to(tl.int64) * N + column
        tl.store(db_ptr + at, tl.sum(db, axis=0, keep_dims=True), mask=column < N)
