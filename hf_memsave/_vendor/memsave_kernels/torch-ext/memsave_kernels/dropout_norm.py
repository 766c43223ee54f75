r"""Dropout, residual and LayerNorm over the last dimension, one kernel each way.

Forward and, for incoming gradients dy and dh of both outputs, backward (means over the N elements of a row)::

    h = residual + dropout(x)
    ĥ = (h - mean(h)) rstd             rstd = 1 / √(mean((h - mean(h))²) + eps)
    y = w ĥ + b
    g = w dy
    dresidual = dh + rstd (g - mean(g) - ĥ mean(g ĥ))
    dx = dropout(dresidual)            the same mask
    dw = Σ dy ĥ        db = Σ dy

y comes in two dtypes where both are wanted, as under autocast, and their gradients are summed. Without a residual and
without dropout h is x, and this is LayerNorm. The statistics are those of h as it is stored, so y can be had again.

Bytes an element in half precision: forward 8, backward with y again 10; LayerNorm alone 4 and 8.
Source: Ba et al. (2016), arXiv:1607.06450.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._define import define
from ._dropout import drop_args
from ._dropout_norm_kernels import dropout_norm_backward_kernel, dropout_norm_forward_kernel
from ._launch import ceil_div, dense, launch, like, row_tile, workers


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, p: float, seed: int,
    out: torch.dtype, low: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    h, y, y_low, mean, rstd = _forward_fake(x, residual, weight, bias, eps, p, seed, out, low)
    tensors = (h if h.numel() else None, y, y_low if low else None, mean, rstd)
    _launch_forward(x, residual, weight, bias, tensors, p, seed, eps, again=False)
    return h, y, y_low, mean, rstd


def _launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, tensors: tuple[Tensor | None, ...],
    p: float, seed: int, eps: float, again: bool,
) -> None:  # fmt: skip
    rows, columns, warps = row_tile(x.shape[-1])
    count = x.numel() // max(1, x.shape[-1])
    launch(
        dropout_norm_forward_kernel, (ceil_div(count, rows),),
        (*dense(x, residual, weight, bias, *tensors), *drop_args(p, seed), count, eps),
        {"N": x.shape[-1], "DROPS": p > 0, "AGAIN": again, "ROWS": rows, "COLUMNS": columns}, warps,
    )  # fmt: skip


def dtype_of_sum(x: Tensor, residual: Tensor | None) -> torch.dtype:
    """That of h."""
    if residual is None or residual.dtype is x.dtype:  # asking PyTorch takes as long as a launch
        return x.dtype
    return torch.promote_types(x.dtype, residual.dtype)


def _forward_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, p: float, seed: int,
    out: torch.dtype, low: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = dtype_of_sum(x, residual)
    h = x.new_empty(x.shape if residual is not None or p > 0 else 0, dtype=dtype)
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    y = like(x, out)
    return h, y, x.new_empty(x.shape if low else 0, dtype=low or out), mean, rstd


def _again(h: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, rstd: Tensor, out: torch.dtype) -> Tensor:
    y = _again_fake(h, weight, bias, mean, rstd, out)
    _launch_forward(h, None, weight, bias, (None, y, None, mean, rstd), 0.0, 0, 0.0, again=True)
    return y


def _again_fake(h: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, rstd: Tensor, out: torch.dtype) -> Tensor:
    return like(h, out)


def _backward(
    dy: Tensor, dlow: Tensor | None, dh: Tensor | None, h: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor,
    rstd: Tensor, p: float, seed: int, x: torch.dtype, residual: torch.dtype | None, has_dw: bool,
    out: torch.dtype | None, low: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    how = (p, seed, x, residual, has_dw, out, low)
    dx, dresidual, dvectors, y, y_low = _backward_fake(dy, dlow, dh, h, weight, bias, mean, rstd, *how)
    rows, columns, warps = row_tile(h.shape[-1], 8, 4096)
    across, down = ceil_div(h.shape[-1], columns), ceil_div(mean.numel(), rows)
    programs = workers(h, down, warps, 72 if dlow is None else 88) if has_dw else down
    parts = h.new_empty(len(dvectors), programs, h.shape[-1], dtype=torch.float32) if has_dw else None
    dw_part, db_part = (None, None) if parts is None else (parts[0], None if bias is None else parts[1])
    launch(
        dropout_norm_backward_kernel, (programs * across,),
        (*dense(dy, dlow, dh, h, weight, bias, mean, rstd), dx, dresidual if dresidual.numel() else None,
         dw_part, db_part, y if out else None, y_low if low else None,
         *drop_args(p, seed), mean.numel()),
        {"N": h.shape[-1], "DROPS": p > 0, "TILES": across, "ROWS": rows, "COLUMNS": columns}, warps,
    )  # fmt: skip
    return dx, dresidual, dvectors if parts is None else parts.sum(1).to(weight.dtype), y, y_low


def _backward_fake(
    dy: Tensor, dlow: Tensor | None, dh: Tensor | None, h: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor,
    rstd: Tensor, p: float, seed: int, x: torch.dtype, residual: torch.dtype | None, has_dw: bool,
    out: torch.dtype | None, low: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    differs = residual is not None and (p > 0 or residual != x)
    vectors = weight.new_empty(0 if not has_dw else 1 if bias is None else 2, *weight.shape)
    y, y_low = (h.new_empty(h.shape if dtype else 0, dtype=dtype or h.dtype) for dtype in (out, low))
    dresidual = h.new_empty(h.shape if differs else 0, dtype=residual or x)
    return like(h, x), dresidual, vectors, y, y_low


_VECTORS = "Tensor weight, Tensor? bias"
_forward_op = define(
    f"dropout_norm_forward(Tensor x, Tensor? residual, {_VECTORS}, float eps, float p, int seed, ScalarType out, "
    "ScalarType? low) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward, _forward_fake,
)  # fmt: skip
_again_op = define(
    f"layer_norm_again(Tensor h, {_VECTORS}, Tensor mean, Tensor rstd, ScalarType out) -> Tensor", _again, _again_fake
)
_backward_op = define(
    f"dropout_norm_backward(Tensor dy, Tensor? dlow, Tensor? dh, Tensor h, {_VECTORS}, Tensor mean, Tensor rstd, "
    "float p, int seed, ScalarType x, ScalarType? residual, bool has_dw, ScalarType? out, ScalarType? low) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward, _backward_fake,
)  # fmt: skip


class Normed(NamedTuple):
    """What :func:`dropout_norm_forward` returns.

    Attributes:
        h: ``[*, N]``, in the promoted dtype of x and residual; x itself where nothing is added or dropped.
        y: ``[*, N]``.
        low: y in the other dtype, or None.
        mean: ``[*]``, float32.
        rstd: ``[*]``, float32.
    """

    h: Tensor
    y: Tensor
    low: Tensor | None
    mean: Tensor
    rstd: Tensor


class Gradients(NamedTuple):
    """What :func:`dropout_norm_backward` returns: in the inputs' dtypes, and y as it was asked for."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    y: Tensor | None
    low: Tensor | None


def dropout_norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float = 1e-5, p: float = 0.0,
    seed: int = 0, out: torch.dtype | None = None, low: torch.dtype | None = None,
) -> Normed:  # fmt: skip
    """Dropout, residual and LayerNorm without autograd.

    Args:
        x: ``[*, N]``, float32, bfloat16 or float16: what is dropped out.
        residual: ``[*, N]``, in any of them, or None.
        weight: ``[N]``.
        bias: ``[N]``, or None.
        eps: Added to the variance.
        p: Probability of dropout.
        seed: Of the mask, below 2^63: from :func:`~memsave_kernels.draw_seed`.
        out: The dtype of y; h's, if None.
        low: A second dtype to have y in, or None.

    Returns:
        h, y, y in the second dtype, and the statistics.
    """
    h_dtype = dtype_of_sum(x, residual)
    h, y, y_low, mean, rstd = _forward_op(x, residual, weight, bias, eps, p, seed, out or h_dtype, low)
    return Normed(h if residual is not None or p > 0 else x, y, y_low if low else None, mean, rstd)


def layer_norm_again(
    h: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, rstd: Tensor, out: torch.dtype | None = None
) -> Tensor:
    """The y of :func:`dropout_norm_forward`, bit for bit, from its results; ``out`` is its dtype, or None for h's."""
    return _again_op(h, weight, bias, mean, rstd, out or h.dtype)


def dropout_norm_backward(
    dy: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, rstd: Tensor, p: float, seed: int,
    x: torch.dtype, residual: torch.dtype | None, *, dlow: Tensor | None = None, dh: Tensor | None = None,
    has_dw: bool = True, out: torch.dtype | None = None, low: torch.dtype | None = None,
) -> Gradients:  # fmt: skip
    """The gradients of :func:`dropout_norm_forward`, and y again in the same pass.

    Args:
        dy: ``[*, N]``, of y.
        h: As forward returned it; and so ``mean`` and ``rstd``.
        weight: As in forward; and so ``bias``, ``p`` and ``seed``.
        bias: See ``weight``.
        mean: See ``h``.
        rstd: See ``h``.
        p: See ``weight``.
        seed: See ``weight``.
        x: The dtype of x.
        residual: That of residual, or None if there was none.
        dlow: ``[*, N]``, of y in the second dtype.
        dh: ``[*, N]``, of h.
        has_dw: Whether the gradients of weight and bias are wanted.
        out: The dtype to have y again in, or None.
        low: A second one, or None.

    Returns:
        The gradients, None for what is not there or not wanted.
    """
    dx, dresidual, dvectors, y, y_low = _backward_op(
        dy, dlow, dh, h, weight, bias, mean, rstd, p, seed, x, residual, has_dw, out, low
    )
    if residual is not None and not (p > 0 or residual != x):
        dresidual = dx
    dw, db = (*dvectors.unbind(), None, None)[:2]
    return Gradients(dx, None if residual is None else dresidual, dw, db, y if out else None, y_low if low else None)


def dropout_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float = 1e-5, p: float = 0.0,
    seed: int = 0, out: torch.dtype | None = None, low: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Dropout, residual and LayerNorm with their gradients; keeps h, weight, bias and two float32 a row.

    Returns:
        h, y, and y in the dtype ``low`` or None; arguments as in :func:`dropout_norm_forward`.
    """
    h, y, y_low = _DropoutNorm.apply(x, residual, weight, bias, eps, p, seed, out, low)
    return (x if h is None else h), y, y_low


class _DropoutNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, p: float,
        seed: int, out: torch.dtype | None, low: torch.dtype | None,
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:  # fmt: skip
        h, y, y_low, mean, rstd = dropout_norm_forward(x, residual, weight, bias, eps, p, seed, out, low)
        ctx.save_for_backward(h, weight, bias, mean, rstd)
        ctx.how = p, seed, x.dtype, None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        return (None if h is x else h), y, y_low

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor | None, dy: Tensor | None, dlow: Tensor | None) -> tuple[Tensor | None, ...]:
        h, weight, bias, mean, rstd = ctx.saved_tensors
        if dy is None:
            dy, dlow = (torch.zeros_like(h) if dlow is None else dlow), None
        found = dropout_norm_backward(
            dy, h, weight, bias, mean, rstd, *ctx.how, dlow=dlow, dh=dh, has_dw=any(ctx.needs_input_grad[2:4])
        )
        return *found[:4], None, None, None, None, None
