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
def _places(row, column, N: tl.constexpr, HAS_BOTH: tl.constexpr):
    """Where a tile lies; by fours where it is read and written in both widths, or each would have another layout."""
    at = row * N + column
    if HAS_BOTH and N % 4 == 0:
        at = tl.multiple_of(at, (1, 4))
    return at


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
    at = _places(row, column, N, x_ptr.dtype != y_ptr.dtype)
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
    at = _places(row, column, N, x_ptr.dtype != h_ptr.dtype)
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


@triton.jit
def _read(h_ptr, dy_ptr, dlow_ptr, at, inside):
    """h, and the gradient of y in both dtypes."""
    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if dlow_ptr is not None:
        dy += tl.load(dlow_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return tl.load(h_ptr + at, mask=inside, other=0.0).to(tl.float32), dy


@triton.jit(do_not_specialize=["seed", "threshold"])
def dropout_norm_backward_kernel(
    dy_ptr, dlow_ptr, dh_ptr, h_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr,
    dx_ptr, dresidual_ptr, dw_ptr, db_ptr, y_ptr, low_ptr, seed: tl.int64, threshold: tl.int64, rows,
    N: tl.constexpr, DROPS: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradients whose pointers are not None, parts of dw and db, and y again: each of one of a row's TILES."""
    worker, workers = tl.program_id(0) // TILES, tl.num_programs(0) // TILES
    start = tl.program_id(0) % TILES * COLUMNS
    column = start + tl.arange(0, COLUMNS)[None, :]
    w, b = _vectors(w_ptr, b_ptr, column, N)
    dw = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    db = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(worker * ROWS, rows, workers * ROWS):
        row = first + tl.arange(0, ROWS)[:, None].to(tl.int64)
        is_row, inside = row < rows, (row < rows) & (column < N)
        at = _places(row, column, N, dx_ptr.dtype != h_ptr.dtype)
        h, dy = _read(h_ptr, dy_ptr, dlow_ptr, at, inside)
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
        if TILES == 1:
            total, product = tl.sum(g, axis=1, keep_dims=True), tl.sum(g * normed, axis=1, keep_dims=True)
        else:  # with the row's other tiles, which other programs take
            total, product = tl.zeros([ROWS, 1], dtype=tl.float32), tl.zeros([ROWS, 1], dtype=tl.float32)
            for tile in range(TILES):
                other = tile * COLUMNS + tl.arange(0, COLUMNS)[None, :]
                a, c = _read(h_ptr, dy_ptr, dlow_ptr, row * N + other, (row < rows) & (other < N))
                c *= tl.load(w_ptr + other, mask=other < N, other=0.0).to(tl.float32)
                total += tl.sum(c, axis=1, keep_dims=True)
                product += tl.sum(c * ((a - mean) * rstd), axis=1, keep_dims=True)
        dh = rstd * (g - total / N - normed * (product / N))
        if dh_ptr is not None:
            dh += tl.load(dh_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + at, dh, mask=inside)
        if dx_ptr is not None:
            if DROPS:
                dh = dropped_out(dh, seed, threshold, row, start, ROWS, COLUMNS)
            tl.store(dx_ptr + at, dh, mask=inside)
    if dw_ptr is not None:
        at = worker.to(tl.int64) * N + column
        tl.store(dw_ptr + at, tl.sum(dw, axis=0, keep_dims=True), mask=column < N)
    if db_ptr is not None:
        at = worker.to(tl.int64) * N + column
        tl.store(db_ptr + at, tl.sum(db, axis=0, keep_dims=True), mask=column < N)
