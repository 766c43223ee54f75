r"""An activation, and its backward with its output again and the bias gradient of the linear before it, in one pass.

Forward and, for an incoming gradient dy, backward::

    y = f(x)
    dx = dy f'(x)
    db = Σ dx            over the rows, before dx is rounded

Bytes an element in half precision: forward 4, backward 6, backward with y again 8.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._activations import activation, check, slope
from ._define import define
from ._launch import ceil_div, launch, like, processors

_BLOCK = 1024
_ROWS, _COLUMNS = 4, 256


@triton.jit
def activation_forward_kernel(x_ptr, y_ptr, n, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """The activation y."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
    tl.store(y_ptr + at, activation(x, ACT), mask=at < n)


@triton.jit
def activation_backward_kernel(
    dy_ptr, x_ptr, dx_ptr, db_ptr, y_ptr, rows, columns,
    ACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient dx of some columns and rows; y and this program's part of db unless their pointers are None."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    db = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row = first + tl.arange(0, ROWS)[:, None].to(tl.int64)
        inside = (row < rows) & (column < columns)
        at = row * columns + column
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dx = dy * slope(x, ACT)
        tl.store(dx_ptr + at, dx, mask=inside)
        if y_ptr is not None:
            tl.store(y_ptr + at, activation(x, ACT), mask=inside)
        if db_ptr is not None:
            db += dx
    if db_ptr is not None:
        at = tl.program_id(1).to(tl.int64) * columns + column
        tl.store(db_ptr + at, tl.sum(db, axis=0, keep_dims=True), mask=column < columns)


def _forward(x: Tensor, act: str) -> Tensor:
    y = _forward_fake(x, act)
    args = (x.contiguous(), y, x.numel())
    launch(activation_forward_kernel, (ceil_div(x.numel(), _BLOCK),), args, {"ACT": act, "BLOCK": _BLOCK})
    return y


def _forward_fake(x: Tensor, act: str) -> Tensor:
    return like(x)


def _backward(dy: Tensor, x: Tensor, act: str, has_db: bool, again: bool) -> tuple[Tensor, Tensor, Tensor]:
    dx, db, y = _backward_fake(dy, x, act, has_db, again)
    columns = x.shape[-1]
    rows, across = x.numel() // max(1, columns), ceil_div(columns, _COLUMNS)
    down = min(ceil_div(rows, _ROWS), ceil_div(8 * processors(x), max(1, across)))
    parts = x.new_empty(down, columns, dtype=torch.float32) if has_db else None
    launch(
        activation_backward_kernel, (across, down),
        (dy.contiguous(), x.contiguous(), dx, parts, y if again else None, rows, columns),
        {"ACT": act, "ROWS": _ROWS, "COLUMNS": _COLUMNS},
    )  # fmt: skip
    return dx, db if parts is None else parts.sum(0), y


def _backward_fake(dy: Tensor, x: Tensor, act: str, has_db: bool, again: bool) -> tuple[Tensor, Tensor, Tensor]:
    db = x.new_empty(x.shape[-1:] if has_db else 0, dtype=torch.float32)
    return like(x), db, x.new_empty(x.shape if again else 0)


_forward_op = define("activation_forward(Tensor x, str act) -> Tensor", _forward, _forward_fake)
_backward_op = define(
    "activation_backward(Tensor dy, Tensor x, str act, bool has_db, bool again) -> (Tensor, Tensor, Tensor)",
    _backward, _backward_fake,
)  # fmt: skip


def activation_forward(x: Tensor, act: str = "gelu") -> Tensor:
    """An activation without autograd; the same bits whenever it is called.

    Args:
        x: ``[*, F]``, float32, bfloat16 or float16.
        act: One of ``ACTIVATIONS``.

    Returns:
        y, like x.
    """
    return _forward_op(x, check(act))


def activation_backward(
    dy: Tensor, x: Tensor, act: str = "gelu", has_db: bool = False, again: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradient of :func:`activation_forward`, its sum over the rows, and y again, in one pass.

    Args:
        dy: ``[*, F]``.
        x: As in forward.
        act: As in forward.
        has_db: Whether the sum is wanted: the gradient of the bias that was added to make x.
        again: Whether y is.

    Returns:
        dx ``[*, F]``, db ``[F]`` in float32 or None, y ``[*, F]`` or None.
    """
    dx, db, y = _backward_op(dy, x, check(act), has_db, again)
    return dx, db if has_db else None, y if again else None


def activate(x: Tensor, act: str = "gelu") -> Tensor:
    """An activation with its gradient; keeps x. Arguments as in :func:`activation_forward`."""
    return _Activation.apply(x, act)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, act: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.act = act
        return activation_forward(x, act)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return activation_backward(dy, x, ctx.act)[0], None
