r"""A LayerNorm or RMSNorm whose backward starts from its output, or where that tells too little from x̂.

Forward and, for an incoming gradient dy, backward (means over the N elements of a row; RMSNorm has no b and no mean)::

    x̂ = (x - mean(x)) rstd              rstd = 1 / √(mean((x - mean(x))²) + eps)
    z = w x̂ + b                         in columns with max(|b|, 8 tiny) <= |w| <= max / (2 √N)
        x̂                               in all others
    y = z                               w z + b in those others
    x̂ = (z - b) / w                     z in those others
    g = w dy
    dx = rstd (g - mean(g) - x̂ mean(g x̂))
    dw = Σ dy x̂        db = Σ dy

tiny and max are the least normal and the largest number of w's dtype. y comes from z as it is stored, so it can be had
again. Bytes an element in half precision: forward 6, again 4, backward 6.
Source: Tempo (2022), arXiv:2210.10246, Section 3.2, which divides by every w.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._define import define
from ._launch import ceil_div, dense, launch, like, row_tile, workers


@triton.jit
def _vectors(w_ptr, b_ptr, column, N: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr):
    """w, b or 0, and which columns of z hold y."""
    w = tl.load(w_ptr + column, mask=column < N, other=1.0).to(tl.float32)
    b = tl.zeros_like(w)
    if b_ptr is not None:
        b = tl.load(b_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    is_y = (tl.abs(w) >= tl.maximum(tl.abs(b), LEAST)) & (tl.abs(w) <= MOST)
    return w, b, is_y


@triton.jit
def _output(z, w, b, is_y):
    """y: the same in forward and again."""
    return tl.where(is_y, z, w * z + b)


@triton.jit
def output_norm_forward_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, z_ptr, rstd_ptr, rows, eps,
    N: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, CENTRED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The output y, z and rstd."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < N)
    x = tl.load(x_ptr + row * N + column, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, axis=1, keep_dims=True) / N, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / N + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    w, b, is_y = _vectors(w_ptr, b_ptr, column, N, LEAST, MOST)
    z = tl.where(is_y, w * (x * rstd) + b, x * rstd).to(z_ptr.dtype.element_ty)
    tl.store(z_ptr + row * N + column, z, mask=inside)
    tl.store(y_ptr + row * N + column, _output(z.to(tl.float32), w, b, is_y), mask=inside)


@triton.jit
def output_norm_again_kernel(
    z_ptr, w_ptr, b_ptr, y_ptr, rows,
    N: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The output y."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < N)
    z = tl.load(z_ptr + row * N + column, mask=inside, other=0.0).to(tl.float32)
    w, b, is_y = _vectors(w_ptr, b_ptr, column, N, LEAST, MOST)
    tl.store(y_ptr + row * N + column, _output(z, w, b, is_y), mask=inside)


@triton.jit
def output_norm_backward_kernel(
    dy_ptr, z_ptr, w_ptr, b_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, rows,
    N: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, CENTRED: tl.constexpr, TILES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient dx, and parts of dw and db unless their pointers are None: each of one of a row's TILES."""
    worker, workers = tl.program_id(0) // TILES, tl.num_programs(0) // TILES
    column = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    w, b, is_y = _vectors(w_ptr, b_ptr, column, N, LEAST, MOST)
    dw = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    db = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(worker * ROWS, rows, workers * ROWS):
        row = first + tl.arange(0, ROWS)[:, None].to(tl.int64)
        inside = (row < rows) & (column < N)
        at = row * N + column
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        normed = tl.where(is_y, (z - b) / w, z)
        g = dy * w
        if TILES == 1:
            product, total = tl.sum(g * normed, axis=1, keep_dims=True), tl.sum(g, axis=1, keep_dims=True)
        else:  # with the row's other tiles, which other programs take
            total, product = tl.zeros([ROWS, 1], dtype=tl.float32), tl.zeros([ROWS, 1], dtype=tl.float32)
            for tile in range(TILES):
                other = tile * COLUMNS + tl.arange(0, COLUMNS)[None, :]
                is_there = (row < rows) & (other < N)
                wo, bo, is_o = _vectors(w_ptr, b_ptr, other, N, LEAST, MOST)
                c = tl.load(dy_ptr + row * N + other, mask=is_there, other=0.0).to(tl.float32) * wo
                a = tl.load(z_ptr + row * N + other, mask=is_there, other=0.0).to(tl.float32)
                total += tl.sum(c, axis=1, keep_dims=True)
                product += tl.sum(c * tl.where(is_o, (a - bo) / wo, a), axis=1, keep_dims=True)
        dx = g - normed * (product / N)
        if CENTRED:
            dx -= total / N
        tl.store(dx_ptr + at, rstd * dx, mask=inside)
        if dw_ptr is not None:
            dw += dy * normed
        if db_ptr is not None:
            db += dy
    at = worker.to(tl.int64) * N + column
    if dw_ptr is not None:
        tl.store(dw_ptr + at, tl.sum(dw, axis=0, keep_dims=True), mask=column < N)
    if db_ptr is not None:
        tl.store(db_ptr + at, tl.sum(db, axis=0, keep_dims=True), mask=column < N)


def _bounds(weight: Tensor) -> dict[str, float]:
    info = torch.finfo(weight.dtype)
    return {"LEAST": 8 * info.tiny, "MOST": info.max / (2 * weight.numel() ** 0.5)}


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool) -> tuple[Tensor, ...]:
    y, z, rstd = _forward_fake(x, weight, bias, eps, centred)
    rows, columns, warps = row_tile(x.shape[-1])
    launch(
        output_norm_forward_kernel, (ceil_div(rstd.numel(), rows),),
        (*dense(x, weight, bias), y, z, rstd, rstd.numel(), eps),
        {"N": x.shape[-1], **_bounds(weight), "CENTRED": centred, "ROWS": rows, "COLUMNS": columns}, warps,
    )  # fmt: skip
    return y, z, rstd


def _forward_fake(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool) -> tuple[Tensor, ...]:
    return like(x), like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _again(z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = _again_fake(z, weight, bias)
    rows, columns, warps = row_tile(z.shape[-1])
    count = z.numel() // max(1, z.shape[-1])
    launch(
        output_norm_again_kernel, (ceil_div(count, rows),), (*dense(z, weight, bias), y, count),
        {"N": z.shape[-1], **_bounds(weight), "ROWS": rows, "COLUMNS": columns}, warps,
    )  # fmt: skip
    return y


def _again_fake(z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return like(z)


def _backward(
    dy: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None, rstd: Tensor, centred: bool, has_dw: bool
) -> tuple[Tensor, Tensor]:
    dx, dvectors = _backward_fake(dy, z, weight, bias, rstd, centred, has_dw)
    rows, columns, warps = row_tile(z.shape[-1], 8, 4096)
    across, down = ceil_div(z.shape[-1], columns), ceil_div(rstd.numel(), rows)
    programs = workers(z, down, warps, 80 if centred else 64) if has_dw else down
    parts = z.new_empty(len(dvectors), programs, z.shape[-1], dtype=torch.float32) if has_dw else None
    dw_part, db_part = (None, None) if parts is None else (parts[0], None if bias is None else parts[1])
    launch(
        output_norm_backward_kernel, (programs * across,),
        (*dense(dy, z, weight, bias, rstd), dx, dw_part, db_part, rstd.numel()),
        {"N": z.shape[-1], **_bounds(weight), "CENTRED": centred, "TILES": across, "ROWS": rows, "COLUMNS": columns},
        warps,
    )  # fmt: skip
    return dx, dvectors if parts is None else parts.sum(1).to(weight.dtype)


def _backward_fake(
    dy: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None, rstd: Tensor, centred: bool, has_dw: bool
) -> tuple[Tensor, Tensor]:
    return like(z), weight.new_empty(0 if not has_dw else 1 if bias is None else 2, *weight.shape)


_VECTORS = "Tensor weight, Tensor? bias"
_forward_op = define(
    f"output_norm_forward(Tensor x, {_VECTORS}, float eps, bool centred) -> (Tensor, Tensor, Tensor)",
    _forward, _forward_fake,
)  # fmt: skip
_again_op = define(f"output_norm_again(Tensor z, {_VECTORS}) -> Tensor", _again, _again_fake)
_backward_op = define(
    f"output_norm_backward(Tensor dy, Tensor z, {_VECTORS}, Tensor rstd, bool centred, bool has_dw)"
    " -> (Tensor, Tensor)",
    _backward, _backward_fake,
)  # fmt: skip


def output_norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, centred: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """A norm, and what its backward starts from.

    Args:
        x: ``[*, N]``, float32, bfloat16 or float16.
        weight: ``[N]``, any numbers.
        bias: ``[N]``, or None.
        eps: Added to the mean square.
        centred: Whether it is a LayerNorm.

    Returns:
        y and z like x, and rstd ``[*]``, float32.
    """
    return _forward_op(x, weight, bias, eps, centred)


def output_norm_again(z: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Y's bits from what :func:`output_norm_forward` returned beside it. Like z."""
    return _again_op(z, weight, bias)


def output_norm_backward(
    dy: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None, rstd: Tensor, centred: bool, has_dw: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of :func:`output_norm_forward`.

    Args:
        dy: ``[*, N]``.
        z: ``[*, N]``, as forward returned it; and so ``rstd``.
        weight: As in forward; and so ``bias`` and ``centred``.
        bias: See ``weight``.
        rstd: See ``z``.
        centred: See ``weight``.
        has_dw: Whether the gradients of weight and bias are wanted.

    Returns:
        dx like z, dw and db ``[N]`` in weight's dtype, None for what is not there or not wanted.
    """
    dx, dvectors = _backward_op(dy, z, weight, bias, rstd, centred, has_dw)
    return dx, dvectors[0] if has_dw else None, dvectors[1] if has_dw and bias is not None else None
