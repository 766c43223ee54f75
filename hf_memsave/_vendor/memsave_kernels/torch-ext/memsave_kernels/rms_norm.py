r"""RMSNorm over the last dimension: of LLaMA, Gemma, T5 and PyTorch.

Forward and, for an incoming gradient dy, backward (means over the N elements of a row)::

    x̂ = x rstd                   rstd = 1 / √(mean(x²) + eps)
    y = (w + offset) mid(x̂)      mid: rounds to a dtype
    g = (w + offset) dy
    dx = rstd (g - x̂ mean(g x̂))
    dw = Σ dy mid(x̂)

============  ======  ==================  ====================
style         offset  mid                 dtype of y
============  ======  ==================  ====================
``"llama"``   0       x's dtype           promoted of x and w
``"gemma"``   1       float32             x's
``"t5"``      0       w's dtype           w's
``"torch"``   0       float32             x's
============  ======  ==================  ====================

Bytes an element in half precision: forward 4, y again 4, backward 6, backward with y again 8.
Source: Zhang and Sennrich (2019), arXiv:1910.07467.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._define import define
from ._launch import ceil_div, dense, launch, like, row_tile, triton_dtype, workers


@triton.jit
def _normalized(x, rstd, MID: tl.constexpr):
    """mid(x̂): the same in forward, again and backward."""
    return (x * rstd).to(MID).to(tl.float32)


@triton.jit
def rms_norm_forward_kernel(
    x_ptr, w_ptr, y_ptr, rstd_ptr, rows, eps,
    N: tl.constexpr, OFFSET: tl.constexpr, MID: tl.constexpr, AGAIN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The output y, and rstd; AGAIN reads rstd."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < N)
    x = tl.load(x_ptr + row * N + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + column, mask=column < N, other=0.0).to(tl.float32) + OFFSET
    if AGAIN:
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
    else:
        rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / N + eps)
        tl.store(rstd_ptr + row, rstd, mask=row < rows)
    tl.store(y_ptr + row * N + column, w * _normalized(x, rstd, MID), mask=inside)


@triton.jit
def rms_norm_backward_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, y_ptr, rows,
    N: tl.constexpr, OFFSET: tl.constexpr, MID: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient dx, y unless its pointer is None, and a part of dw unless that is; each of one of a row's TILES."""
    worker, workers = tl.program_id(0) // TILES, tl.num_programs(0) // TILES
    column = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    w = tl.load(w_ptr + column, mask=column < N, other=0.0).to(tl.float32) + OFFSET
    dw = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(worker * ROWS, rows, workers * ROWS):
        row = first + tl.arange(0, ROWS)[:, None].to(tl.int64)
        inside = (row < rows) & (column < N)
        at = row * N + column
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        normed = _normalized(x, rstd, MID)
        if y_ptr is not None:
            tl.store(y_ptr + at, w * normed, mask=inside)
        if dw_ptr is not None:
            dw += dy * normed
        if TILES == 1:
            product = tl.sum(dy * w * (x * rstd), axis=1, keep_dims=True)
        else:  # as another program does for the row's other tiles, at this time
            product = tl.zeros([ROWS, 1], dtype=tl.float32)
            for tile in range(TILES):
                other = tile * COLUMNS + tl.arange(0, COLUMNS)[None, :]
                is_there = (row < rows) & (other < N)
                a = tl.load(x_ptr + row * N + other, mask=is_there, other=0.0).to(tl.float32) * rstd
                b = tl.load(w_ptr + other, mask=other < N, other=0.0).to(tl.float32) + OFFSET
                c = tl.load(dy_ptr + row * N + other, mask=is_there, other=0.0).to(tl.float32)
                product += tl.sum(c * b * a, axis=1, keep_dims=True)
        tl.store(dx_ptr + at, rstd * (dy * w - x * rstd * (product / N)), mask=inside)
    if dw_ptr is not None:
        at = worker.to(tl.int64) * N + column
        tl.store(dw_ptr + at, tl.sum(dw, axis=0, keep_dims=True), mask=column < N)


class _Style(NamedTuple):
    """How one style computes y: see the table above."""

    offset: float
    mid: torch.dtype
    out: torch.dtype


@functools.cache
def _style_of(name: str, x: torch.dtype, w: torch.dtype) -> _Style:
    styles = {
        "llama": _Style(0.0, x, torch.promote_types(x, w)),
        "gemma": _Style(1.0, torch.float32, x),
        "t5": _Style(0.0, w, w),
        "torch": _Style(0.0, torch.float32, x),
    }
    if name not in styles:
        raise ValueError(f"expected a style in {sorted(styles)}, got {name!r}")
    return styles[name]


def _launch_forward(x: Tensor, weight: Tensor, rstd: Tensor, y: Tensor, eps: float, style: str, again: bool) -> None:
    rows, columns, warps = row_tile(x.shape[-1])
    offset, mid, _ = _style_of(style, x.dtype, weight.dtype)
    launch(
        rms_norm_forward_kernel, (ceil_div(rstd.numel(), rows),),
        (*dense(x, weight), y, *dense(rstd), rstd.numel(), eps),
        {"N": x.shape[-1], "OFFSET": offset, "MID": triton_dtype(mid), "AGAIN": again, "ROWS": rows,
         "COLUMNS": columns}, warps,
    )  # fmt: skip


def _forward(x: Tensor, weight: Tensor, eps: float, style: str) -> tuple[Tensor, Tensor]:
    y, rstd = _forward_fake(x, weight, eps, style)
    _launch_forward(x, weight, rstd, y, eps, style, again=False)
    return y, rstd


def _forward_fake(x: Tensor, weight: Tensor, eps: float, style: str) -> tuple[Tensor, Tensor]:
    out = _style_of(style, x.dtype, weight.dtype).out
    return like(x, out), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _again(x: Tensor, weight: Tensor, rstd: Tensor, style: str) -> Tensor:
    y = _again_fake(x, weight, rstd, style)
    _launch_forward(x, weight, rstd, y, 0.0, style, again=True)
    return y


def _again_fake(x: Tensor, weight: Tensor, rstd: Tensor, style: str) -> Tensor:
    return like(x, _style_of(style, x.dtype, weight.dtype).out)


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, style: str, has_dw: bool, again: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw, y = _backward_fake(dy, x, weight, rstd, style, has_dw, again)
    offset, mid, _ = _style_of(style, x.dtype, weight.dtype)
    rows, columns, warps = row_tile(x.shape[-1], 8, 8192) if has_dw else row_tile(x.shape[-1])
    across, down = ceil_div(x.shape[-1], columns), ceil_div(rstd.numel(), rows)
    programs = workers(x, down, warps, 64 if columns <= 4096 else 96) if has_dw else down
    parts = x.new_empty(programs, x.shape[-1], dtype=torch.float32) if has_dw else None
    launch(
        rms_norm_backward_kernel, (programs * across,),
        (*dense(dy, x, weight, rstd), dx, parts, y if again else None, rstd.numel()),
        {"N": x.shape[-1], "OFFSET": offset, "MID": triton_dtype(mid), "TILES": across, "ROWS": rows,
         "COLUMNS": columns}, warps,
    )  # fmt: skip
    return dx, dw if parts is None else parts.sum(0).to(weight.dtype), y


def _backward_fake(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, style: str, has_dw: bool, again: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dw = weight.new_empty(weight.shape if has_dw else 0)
    return like(x), dw, like(dy) if again else dy.new_empty(0)


_forward_op = define(
    "rms_norm_forward(Tensor x, Tensor weight, float eps, str style) -> (Tensor, Tensor)", _forward, _forward_fake
)
_again_op = define("rms_norm_again(Tensor x, Tensor weight, Tensor rstd, str style) -> Tensor", _again, _again_fake)
_backward_op = define(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd, str style, bool has_dw, bool again)"
    " -> (Tensor, Tensor, Tensor)",
    _backward, _backward_fake,
)  # fmt: skip


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float, style: str = "llama") -> tuple[Tensor, Tensor]:
    """RMSNorm without autograd.

    Args:
        x: ``[*, N]``, float32, bfloat16 or float16.
        weight: ``[N]``, likewise.
        eps: Added to the mean of the squares.
        style: ``"llama"``, ``"gemma"``, ``"t5"`` or ``"torch"``, see the table above.

    Returns:
        y ``[*, N]``, and rstd ``[*]`` in float32 for :func:`rms_norm_again` and :func:`rms_norm_backward`.
    """
    return _forward_op(x, weight, eps, style)


def rms_norm_again(x: Tensor, weight: Tensor, rstd: Tensor, style: str = "llama") -> Tensor:
    """The y of :func:`rms_norm_forward`, bit for bit, from the same arguments and the rstd that it returned."""
    return _again_op(x, weight, rstd, style)


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, style: str = "llama", has_dw: bool = True, again: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of :func:`rms_norm_forward`, and y again in the same pass.

    Args:
        dy: ``[*, N]``, in y's dtype.
        x: As in forward.
        weight: As in forward.
        rstd: As forward returned it.
        style: As in forward.
        has_dw: Whether dw is wanted.
        again: Whether y is.

    Returns:
        dx ``[*, N]`` in x's dtype, dw ``[N]`` in weight's or None, and y ``[*, N]`` or None.
    """
    dx, dw, y = _backward_op(dy, x, weight, rstd, style, has_dw, again)
    return dx, dw if has_dw else None, y if again else None


def rms_norm(x: Tensor, weight: Tensor, eps: float, style: str = "llama") -> Tensor:
    """RMSNorm with its gradients; keeps x, weight and one float32 a row. Arguments as in :func:`rms_norm_forward`."""
    return _RMSNorm.apply(x, weight, eps, style)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, style: str) -> Tensor:
        y, rstd = rms_norm_forward(x, weight, eps, style)
        ctx.save_for_backward(x, weight, rstd)
        ctx.style = style
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dx, dw, _ = rms_norm_backward(dy, x, weight, rstd, ctx.style, ctx.needs_input_grad[1])
        return dx, dw, None, None
