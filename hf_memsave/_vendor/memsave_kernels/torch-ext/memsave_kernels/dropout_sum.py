r"""The sum of :mod:`memsave_kernels.dropout_norm` again, from what it was made from.

Before the norm is h = residual + dropout(x). The residual may be the output of such a norm itself, of which h₀ was the
sum; then it is made from that as it is added, and neither written nor read::

    h = (w (h₀ - mean) rstd + b) + dropout(x)

Bytes an element in half precision: 6.
"""

from torch import Tensor

from ._define import define
from ._dropout import drop_args
from ._dropout_norm_kernels import dropout_sum_kernel
from ._launch import ceil_div, dense, launch, like, row_tile
from .dropout_norm import dtype_of_sum


def _sum(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, rstd: Tensor | None,
    p: float, seed: int,
) -> Tensor:  # fmt: skip
    h = _sum_fake(x, residual, weight, bias, mean, rstd, p, seed)
    rows, columns, warps = row_tile(x.shape[-1])
    count = x.numel() // max(1, x.shape[-1])
    launch(
        dropout_sum_kernel, (ceil_div(count, rows),),
        (*dense(x, residual, weight, bias, mean, rstd), h, *drop_args(p, seed), count),
        {"N": x.shape[-1], "DROPS": p > 0, "ROWS": rows, "COLUMNS": columns}, warps,
    )  # fmt: skip
    return h


def _sum_fake(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, rstd: Tensor | None,
    p: float, seed: int,
) -> Tensor:  # fmt: skip
    return like(x, dtype_of_sum(x, residual))


_sum_op = define(
    "dropout_sum(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? rstd, float p, "
    "int seed) -> Tensor",
    _sum, _sum_fake,
)  # fmt: skip


def dropout_sum(
    x: Tensor, residual: Tensor, p: float, seed: int,
    norm: tuple[Tensor, Tensor | None, Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """The h of :func:`dropout_norm_forward`, bit for bit, and nothing else.

    Args:
        x: ``[*, N]``; and so ``p`` and ``seed``, as in forward.
        residual: ``[*, N]``; or, with ``norm``, the h that gave the residual as its y, if both are of this sum's dtype.
        p: See ``x``.
        seed: See ``x``.
        norm: Weight, bias or None, mean and rstd by which it gave it.

    Returns:
        h.
    """
    weight, bias, mean, rstd = norm or (None,) * 4
    return _sum_op(x, residual, weight, bias, mean, rstd, p, seed)
