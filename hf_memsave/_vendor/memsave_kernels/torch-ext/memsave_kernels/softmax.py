r"""Softmax and dropout of eager attention, one kernel each way.

Of each row of scores x, and for an incoming gradient dd of the second output, backward::

    p = softmax(c x + mask)               in float32, rounded once
    d = dropout(p)
    dp = dropout(dd)                      the same mask of dropout
    dx = c p (dp - Σ dp p)

p is all that has to be kept: d is drawn again from it, in the same pass if the product with the values wants it. Bytes
an element in half precision: forward 6 and the mask, 4 without dropout; backward 6, with d again 8.
Source: Vaswani et al. (2017), arXiv:1706.03762.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._dropout import drop_args, dropped_out
from ._launch import ceil_div, dense, launch, like, row_tile
from ._ops import define


@triton.jit(do_not_specialize=["seed", "threshold"])
def softmax_dropout_forward_kernel(
    x_ptr, mask_ptr, p_ptr, d_ptr, seed: tl.int64, threshold: tl.int64, rows, scale, heads, length,
    mask_batch, mask_head, mask_row, N: tl.constexpr, DROPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The probabilities p, and d unless its pointer is None."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < N)
    x = scale * tl.load(x_ptr + row * N + column, mask=inside, other=0.0).to(tl.float32)
    if mask_ptr is not None:
        batch, head, token = row // (heads * length), row // length % heads, row % length
        at = batch * mask_batch + head * mask_head + token * mask_row + column
        x += tl.load(mask_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(column < N, x, -float("inf"))
    e = tl.exp(x - tl.max(x, axis=1, keep_dims=True))
    p = (e / tl.sum(e, axis=1, keep_dims=True)).to(p_ptr.dtype.element_ty)
    tl.store(p_ptr + row * N + column, p, mask=inside)
    if DROPS:
        d = dropped_out(p.to(tl.float32), seed, threshold, row, 0, ROWS, COLUMNS)
        tl.store(d_ptr + row * N + column, d, mask=inside)


@triton.jit(do_not_specialize=["seed", "threshold"])
def softmax_dropout_backward_kernel(
    dd_ptr, p_ptr, dx_ptr, d_ptr, seed: tl.int64, threshold: tl.int64, rows, scale,
    N: tl.constexpr, DROPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient dx, and d again unless its pointer is None."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < N)
    p = tl.load(p_ptr + row * N + column, mask=inside, other=0.0).to(tl.float32)
    dp = tl.load(dd_ptr + row * N + column, mask=inside, other=0.0).to(tl.float32)
    if DROPS:
        dp = dropped_out(dp, seed, threshold, row, 0, ROWS, COLUMNS)
    if d_ptr is not None:
        tl.store(d_ptr + row * N + column, dropped_out(p, seed, threshold, row, 0, ROWS, COLUMNS), mask=inside)
    share = tl.sum(dp * p, axis=1, keep_dims=True)
    tl.store(dx_ptr + row * N + column, scale * p * (dp - share), mask=inside)


def _forward(
    x: Tensor, mask: Tensor | None, scale: float, p: float, seed: int, out: torch.dtype
) -> tuple[Tensor, Tensor]:
    weights, dropped = _forward_fake(x, mask, scale, p, seed, out)
    rows, columns, warps = row_tile(x.shape[-1])
    steps: tuple[int, ...] = (0, 0, 0)
    if mask is not None:
        mask = (mask if mask.stride(-1) == 1 else mask.contiguous()).expand(x.shape)
        steps = mask.stride()[:3]
    count = x.numel() // max(1, x.shape[-1])
    launch(
        softmax_dropout_forward_kernel, (ceil_div(count, rows),),
        (x.contiguous(), mask, weights, dropped if p > 0 else None, *drop_args(p, seed), count, scale,
         x.shape[1], x.shape[2], *steps),
        {"N": x.shape[-1], "DROPS": p > 0, "ROWS": rows, "COLUMNS": columns}, warps,
    )  # fmt: skip
    return weights, dropped


def _forward_fake(
    x: Tensor, mask: Tensor | None, scale: float, p: float, seed: int, out: torch.dtype
) -> tuple[Tensor, Tensor]:
    return like(x, out), x.new_empty(x.shape if p > 0 else 0, dtype=out)


def _backward(
    dd: Tensor, weights: Tensor, scale: float, p: float, seed: int, x: torch.dtype, again: bool
) -> tuple[Tensor, Tensor]:
    dx, dropped = _backward_fake(dd, weights, scale, p, seed, x, again)
    rows, columns, warps = row_tile(weights.shape[-1])
    count = weights.numel() // max(1, weights.shape[-1])
    launch(
        softmax_dropout_backward_kernel, (ceil_div(count, rows),),
        (*dense(dd, weights), dx, dropped if again and p > 0 else None, *drop_args(p, seed), count, scale),
        {"N": weights.shape[-1], "DROPS": p > 0, "ROWS": rows, "COLUMNS": columns}, warps,
    )  # fmt: skip
    return dx, dropped


def _backward_fake(
    dd: Tensor, weights: Tensor, scale: float, p: float, seed: int, x: torch.dtype, again: bool
) -> tuple[Tensor, Tensor]:
    return like(weights, x), weights.new_empty(weights.shape if again and p > 0 else 0)


_forward_op = define(
    "softmax_dropout_forward(Tensor x, Tensor? mask, float scale, float p, int seed, ScalarType out)"
    " -> (Tensor, Tensor)",
    _forward, _forward_fake,
)  # fmt: skip
_backward_op = define(
    "softmax_dropout_backward(Tensor dd, Tensor weights, float scale, float p, int seed, ScalarType x, bool again)"
    " -> (Tensor, Tensor)",
    _backward, _backward_fake,
)  # fmt: skip


def softmax_dropout_forward(
    x: Tensor, mask: Tensor | None = None, scale: float = 1.0, p: float = 0.0, seed: int = 0,
    out: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention's probabilities, before and after dropout, without autograd.

    Args:
        x: ``[batch, heads, queries, keys]``, float32, bfloat16 or float16.
        mask: Added to ``scale * x``, of a shape that broadcasts to x's but for the last dimension, or None.
        scale: What x is multiplied by.
        p: Probability of dropout.
        seed: Of its mask, below 2^63: from :func:`~memsave_kernels.draw_seed`.
        out: The dtype of the probabilities; x's, if None.

    Returns:
        The probabilities and the dropped-out ones, like x in ``out``; the same tensor twice if ``p`` is 0.

    Raises:
        ValueError: The shapes do not fit.
    """
    if x.dim() != 4 or (mask is not None and (mask.dim() != 4 or mask.shape[-1] != x.shape[-1])):
        shapes = tuple(x.shape), None if mask is None else tuple(mask.shape)
        raise ValueError(
            f"expected [batch, heads, queries, keys] and a mask with four dimensions and as many keys, got {shapes}"
        )
    weights, dropped = _forward_op(x, mask, scale, p, seed, out or x.dtype)
    return weights, dropped if p > 0 else weights


def softmax_dropout_backward(
    dd: Tensor, weights: Tensor, scale: float, p: float, seed: int, x: torch.dtype, again: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The gradient of :func:`softmax_dropout_forward`, and the dropped-out probabilities again in the same pass.

    Args:
        dd: Of the dropped-out probabilities.
        weights: The probabilities, as forward returned them.
        scale: As in forward; and so ``p`` and ``seed``.
        p: See ``scale``.
        seed: See ``scale``.
        x: The dtype of x.
        again: Whether the dropped-out probabilities are wanted.

    Returns:
        dx, and the dropped-out probabilities or None.
    """
    dx, dropped = _backward_op(dd, weights, scale, p, seed, x, again)
    return dx, (dropped if p > 0 else weights) if again else None


def softmax_dropout(
    x: Tensor, mask: Tensor | None = None, scale: float = 1.0, p: float = 0.0, seed: int = 0,
    out: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Attention's dropped-out probabilities with x's gradient; keeps the probabilities before dropout.

    The mask gets no gradient. Arguments as in :func:`softmax_dropout_forward`.

    Returns:
        Like x, in ``out``.
    """
    return _SoftmaxDropout.apply(x, mask, scale, p, seed, out)


class _SoftmaxDropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mask: Tensor | None, scale: float, p: float, seed: int, out: torch.dtype | None
    ) -> Tensor:
        weights, dropped = softmax_dropout_forward(x, mask, scale, p, seed, out)
        ctx.save_for_backward(weights)
        ctx.how = scale, p, seed, x.dtype
        return dropped

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dd: Tensor) -> tuple[Tensor | None, ...]:
        (weights,) = ctx.saved_tensors
        return softmax_dropout_backward(dd, weights, *ctx.how)[0], None, None, None, None, None
