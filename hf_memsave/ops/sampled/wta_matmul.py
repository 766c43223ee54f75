r"""``wta_matmul``: a product of two activations, both of whose gradients are made from samples.

Forward and, for an incoming gradient dC, backward, for each leading index (a head of a sequence), with A ``[n, m]``,
B ``[m, q]``, a draw of columns j_t with scales s_t, and one of rows i_t with scales r_t::

    C = A B
    dA = Σ_t s_t dC_{:, j_t} B_{:, j_t}ᵀ        (unbiased: E[dA] = dC Bᵀ; Eqs. 5 and 6)
    dB = Σ_t r_t A_{i_t, :}ᵀ dC_{i_t, :}        (unbiased: E[dB] = Aᵀ dC)

Attention's Q Kᵀ so samples keys for dQ and queries for dK, and its P V columns of the head dimension for dP and queries
for dV. Each draw is independent of the other, and of those for other heads; its probabilities are the norms of the
columns of B, or of the rows of A. Softmax's backward between the two products is exact, so dQ, dK and dV are unbiased.

Kept for backward::

    stock    A and B
    here     the same and 8 bytes a drawn row or column, where that is kept anyway (as P is) or promised for less;
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
from hf_memsave.sampling.batch import Batch
from hf_memsave.sampling.sampler import Layer
from hf_memsave.tape import current
from hf_memsave.tape.private import no_modes

_COLUMNS, _ROWS = -1, -2


class Sample(NamedTuple):
    """What is kept of one operand: of the leading dimensions ``*`` and k drawn columns or rows.

    Attributes:
        index: Which, int32 ``[*, k]``.
        scale: Their scales, fp32 ``[*, k]``; None where they are in ``drawn`` already.
        drawn: Those columns ``[*, m, k]`` or rows ``[*, k, m]``, scaled; None where the whole operand is kept.
    """

    index: Tensor  # type: ignore[assignment]  # a tuple's method, asked of no sample
    scale: Tensor | None
    drawn: Tensor | None


def wta_matmul(a: Tensor, b: Tensor, layer: Layer, name: str) -> Tensor:
    """``a @ b`` with sampled gradients, where a batch runs and the leading dimensions are equal; else exact.

    Args:
        a: ``[*, n, m]``.
        b: ``[*, m, q]``.
        layer: The name that draws are made under, and the sampler.
        name: Tells the products of one layer apart.

    Returns:
        The product, the bits of ``torch.matmul``.
    """
    batch = layer.sampler.batch
    if batch is None or a.shape[:-2] != b.shape[:-2] or not torch.is_grad_enabled():
        return torch.matmul(a, b)
    columns = _sample(b, _COLUMNS, layer, f"{name}, left", batch) if a.requires_grad else None
    rows = _sample(a, _ROWS, layer, f"{name}, right", batch) if b.requires_grad else None
    if columns is None and rows is None:
        return torch.matmul(a, b)
    return _SampledMatmul.apply(a, b, columns, rows)


@torch.no_grad()
def _draw(x: Tensor, dim: int, layer: Layer, name: str, batch: Batch) -> tuple[Tensor, Tensor] | None:
    config, m = layer.sampler.config, x.shape[dim]
    k = max(round(config.budget * m), config.minimum)
    if k >= m:
        return None
    other = _ROWS if dim == _COLUMNS else _COLUMNS
    precision = torch.promote_types(x.dtype, torch.float32)  # squares would overflow in fp16
    drawing = drawing_for(x)
    p = drawing.probabilities(torch.linalg.vector_norm(x, dim=other, dtype=precision))
    return layer.sampler.choose(p, k, f"{layer.name}, {name}", batch, drawing)


def _sample(x: Tensor, dim: int, layer: Layer, name: str, batch: Batch) -> Sample | None:
    """What to keep of ``x``; None where all of it is needed."""
    if (draw := _draw(x, dim, layer, name, batch)) is None:
        return None
    index, scale, tape = draw[0].int(), draw[1], current()
    size = x.nbytes // x.shape[dim] * index.shape[-1]
    if tape is not None and tape.cost(x) + scale.nbytes <= size:
        return Sample(index, scale, None)
    with no_modes():
        drawn = _scaled(x.detach(), index, scale, dim)
    if tape is not None:
        tape.as_activation(drawn)
    return Sample(index, None, drawn)


class _SampledMatmul(torch.autograd.Function):
    """``a @ b``; what is kept of b makes the gradient of a, and what is kept of a that of b."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, columns: Sample | None, rows: Sample | None) -> Tensor:
        for_a, for_b = ctx.needs_input_grad[:2]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*_kept(b, columns, for_a), *_kept(a, rows, for_b))
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


def _kept(x: Tensor, sample: Sample | None, is_wanted: bool) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if not is_wanted:
        return None, None, None
    if sample is None:
        return x, None, None
    return x if sample.drawn is None else sample.drawn, sample.index, sample.scale


def _taken(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """The columns or rows of ``x`` ``[*, n, q]`` at ``index`` ``[*, k]``."""
    if dim == _COLUMNS:
        return x.gather(dim, index.long()[..., None, :].expand(*x.shape[:-1], -1))
    return x.gather(dim, index.long()[..., :, None].expand(*index.shape, x.shape[-1]))


def _scaled(x: Tensor, index: Tensor, scale: Tensor, dim: int) -> Tensor:
    scale = scale[..., None, :] if dim == _COLUMNS else scale[..., :, None]
    return (_taken(x, index, dim) * scale).to(x.dtype)
