r"""``wta_matmul``: a product of two activations, both of whose gradients are made from samples.

Forward and, for an incoming gradient dC, backward, for each leading index (a head of a sequence), with A ``[n, m]``,
B ``[m, q]``, a draw of columns j_t with scales s_t, and one of rows i_t with scales r_t::

    C = A B
    dA = Σ_t s_t dC_{:, j_t} B_{:, j_t}ᵀ        (unbiased: E[dA] = dC Bᵀ; Eqs. 5 and 6)
    dB = Σ_t r_t A_{i_t, :}ᵀ dC_{i_t, :}        (unbiased: E[dB] = Aᵀ dC)

Attention's Q Kᵀ so samples keys for dQ and queries for dK, and its P V columns of the head dimension for dP and queries
for dV. All draws are independent, by the norms of B's columns or of A's rows. Softmax's backward between the two
products is exact, so dQ, dK and dV are unbiased.

Kept for backward::

    stock    A and B
    here     the same and 8 bytes a drawn row or column, where that is kept anyway (as P is) or recomputed from less;
             else the drawn ones, scaled, and 4 bytes each

A dimension no longer than its draw is taken whole. Not differentiable twice.
Source: Liu et al. (2023), arXiv:2305.15265, Figure 5 (TensorMul-1 and -2).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_memsave.ops.fused.codes import drawing_for
from hf_memsave.ops.op import once_differentiable
from hf_memsave.ops.sampled.batch import Batch
from hf_memsave.ops.sampled.sampler import Layer
from hf_memsave.tape import current
from hf_memsave.tape.decide import cost
from hf_memsave.tape.private import no_modes

_COLUMNS, _ROWS = -1, -2


class Sample(NamedTuple):
    """The kept part of an operand, with leading dimensions ``*`` and k drawn columns or rows."""

    x: Tensor | None = None  # the whole operand, or its drawn columns [*, m, k] or rows [*, k, m], scaled
    drawn: Tensor | None = None  # their indices, int32 [*, k]; None for all
    scale: Tensor | None = None  # their scales, fp32 [*, k]; None where they are in x already


def wta_matmul(a: Tensor, b: Tensor, layer: Layer, name: str) -> Tensor:
    """Return ``a @ b`` of ``[*, n, m]`` and ``[*, m, q]``, with gradients sampled, by draws of its name, in a batch."""
    batch = layer.sampler.batch
    if batch is None or a.shape[:-2] != b.shape[:-2] or not torch.is_grad_enabled():
        return torch.matmul(a, b)
    columns = _sample(b, _COLUMNS, layer, f"{name}, left", batch) if a.requires_grad else Sample()
    rows = _sample(a, _ROWS, layer, f"{name}, right", batch) if b.requires_grad else Sample()
    if columns.drawn is None and rows.drawn is None:
        return torch.matmul(a, b)
    return _SampledMatmul.apply(a, b, columns, rows)


def _sample(x: Tensor, dim: int, layer: Layer, name: str, batch: Batch) -> Sample:
    config, m = layer.sampler.config, x.shape[dim]
    k = max(round(config.budget * m), config.minimum)
    if k >= m:
        return Sample(x)
    drawing, tape = drawing_for(x), current()
    with torch.no_grad():
        precision = torch.promote_types(x.dtype, torch.float32)  # squares would overflow in fp16
        p = drawing.probabilities(torch.linalg.vector_norm(x, dim=-3 - dim, dtype=precision))  # over the other one
        draw = layer.sampler.choose(p, k, f"{layer.name}, {name}", batch, drawing)
    index, scale = draw.index.int(), draw.scale
    if tape is not None and cost(tape, x) + scale.nbytes <= x.nbytes // m * k:
        return Sample(x, index, scale)
    with no_modes():
        drawn = _scaled(x.detach(), index, scale, dim)
    if tape is not None:
        tape.as_activation(drawn)
    return Sample(drawn, index)


class _SampledMatmul(torch.autograd.Function):
    """``a @ b``; the gradient of a is computed from what is kept of b, and the gradient of b from what is kept of a."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, columns: Sample, rows: Sample) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*columns, *rows)
        return torch.matmul(a, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dc: Tensor) -> tuple[Tensor | None, ...]:
        b, columns, of_columns, a, rows, of_rows = ctx.saved_tensors
        da = db = None
        if b is not None:
            b = b if of_columns is None else _scaled(b, columns, of_columns, _COLUMNS)
            da = (dc if columns is None else _taken(dc, columns, _COLUMNS)) @ b.mT
        if a is not None:
            a = a if of_rows is None else _scaled(a, rows, of_rows, _ROWS)
            db = a.mT @ (dc if rows is None else _taken(dc, rows, _ROWS))
        return da, db, None, None


def _taken(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """Return the columns or rows of ``x`` ``[*, n, q]`` at ``index`` ``[*, k]``."""
    return x.take_along_dim(index.long().unsqueeze(-3 - dim), dim)


def _scaled(x: Tensor, index: Tensor, scale: Tensor, dim: int) -> Tensor:
    return (_taken(x, index, dim) * scale.unsqueeze(-3 - dim)).to(x.dtype)
