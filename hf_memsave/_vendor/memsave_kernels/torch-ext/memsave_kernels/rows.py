r"""Rows drawn for a sampled product, scaled; and the norms that they are drawn by.

::

    y_t = s_t x_{i_t}            norm_i = √(Σ x_i²)

Bytes an element in half precision: a drawn one 4, the norms 2. Source: Liu et al. (2023), arXiv:2305.15265.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._define import define
from ._launch import ceil_div, dense, launch

_BLOCK = 1024


@triton.jit
def gather_rows_kernel(x_ptr, index_ptr, scale_ptr, y_ptr, rows, columns, BLOCK: tl.constexpr):
    """One block of one drawn row, times its scale unless that pointer is None; NaN for an index outside."""
    blocks = tl.cdiv(columns, BLOCK)
    drawn = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index_ptr + drawn).to(tl.int64)
    inside = (column < columns) & (row >= 0) & (row < rows)
    y = tl.load(x_ptr + row * columns + column, mask=inside, other=float("nan")).to(tl.float32)
    if scale_ptr is not None:
        y *= tl.load(scale_ptr + drawn)
    tl.store(y_ptr + drawn * columns + column, y, mask=column < columns)


@triton.jit
def row_norms_kernel(x_ptr, norms_ptr, columns, BLOCK: tl.constexpr):
    """The norm of one row."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * columns + column, mask=column < columns, other=0.0).to(tl.float32)
        total += x * x
    tl.store(norms_ptr + row, tl.sqrt(tl.sum(total, axis=0)))


def _gather(x: Tensor, index: Tensor, scale: Tensor | None) -> Tensor:
    y = _gather_fake(x, index, scale)
    block = min(_BLOCK, max(16, triton.next_power_of_2(x.shape[1])))
    args = (*dense(x, index, scale), y, *x.shape)
    launch(gather_rows_kernel, (index.shape[0] * ceil_div(x.shape[1], block),), args, {"BLOCK": block})
    return y


def _gather_fake(x: Tensor, index: Tensor, scale: Tensor | None) -> Tensor:
    return x.new_empty(index.shape[0], x.shape[1])


def _norms(x: Tensor) -> Tensor:
    norms = _norms_fake(x)
    block = min(_BLOCK, max(16, triton.next_power_of_2(x.shape[-1])))
    launch(row_norms_kernel, (norms.numel(),), (x.contiguous(), norms, x.shape[-1]), {"BLOCK": block})
    return norms


def _norms_fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


_gather_op = define("gather_rows(Tensor x, Tensor index, Tensor? scale) -> Tensor", _gather, _gather_fake)
_norms_op = define("row_norms(Tensor x) -> Tensor", _norms, _norms_fake)


def gather_rows(x: Tensor, index: Tensor, scale: Tensor | None = None) -> Tensor:
    """Some rows of a matrix, each times a number.

    Args:
        x: ``[rows, N]``, float32, bfloat16 or float16.
        index: ``[k]``, int32 or int64; what is no row gives NaN.
        scale: ``[k]``, float32, or None.

    Returns:
        ``[k, N]`` in x's dtype.
    """
    return _gather_op(x, index, scale)


def row_norms(x: Tensor) -> Tensor:
    """The Euclidean norms of the rows of ``[*, N]``: float32 ``[*]``."""
    return _norms_op(x)
