r"""``wta_crs``: a linear whose weight gradient is made from a sample of its rows (tokens).

Forward and, for an incoming gradient dz, backward, with h ``[n, in]`` and a draw of k rows i_t with scales s_t::

    z = h Wᵀ + b
    dh = dz W            db = Σ_i dz_i            (exact, as stock)
    dW = Σ_t s_t dz_{i_t} h_{i_t}ᵀ                (unbiased: E[dW] = dzᵀ h; Eqs. 5 and 6)

Kept for backward, beside the weight::

    exact    h, or what it is recomputed from
    here     the same and 8 bytes a drawn row, where that is kept anyway (as a norm's input is); else k scaled rows of h

Linears that share an input share one draw, by their joint norm. Sampled are linears in training whose weight wants a
gradient. Exact are parametrized ones, batches with fewer tokens than rows, and linears that no target names, where all
of h is kept anyway or had for less than the rows. Not differentiable twice.
Source: Liu et al. (2023), arXiv:2305.15265, Algorithm 1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_memsave.ops.fused.codes import FUSED_DRAWING, drawing_for
from hf_memsave.ops.fused.kernels import kernels
from hf_memsave.ops.op import Op, autocast_low, is_parametrized, once_differentiable
from hf_memsave.ops.sampled.batch import Batch, Tokens
from hf_memsave.ops.sampled.estimators import row_norms
from hf_memsave.ops.sampled.sampler import Layer
from hf_memsave.tape import Tape, current
from hf_memsave.tape.decide import cost
from hf_memsave.tape.private import after_backward, backward_id, no_modes

#: Where a sampled module finds its :class:`~hf_memsave.ops.sampled.Layer`.
LAYER = "_memsave_layer"


class JointNorms:
    """The joint norms of the output gradients of all linears that use one draw, which backward tells the cache."""

    def __init__(self, layer: Layer, batch: Batch, tokens: Tokens | None) -> None:
        self.layer, self.batch, self.tokens = layer, batch, tokens
        self.users = self.waiting = 0
        self.squared: Tensor | None = None

    def learn(self, dz: Tensor | None) -> None:
        """Add a linear's output gradient ``[n, out]``, or None, in backward; the draw's last linear tells the cache."""
        if dz is not None:
            squared = row_norms(dz).float().square()
            self.squared = squared if self.squared is None else self.squared + squared
        self.waiting -= 1
        if self.waiting:
            return
        joint, self.squared, self.waiting = self.squared, None, self.users  # for a second backward
        if self.tokens is not None and joint is not None:
            cache = self.layer.sampler.cache
            cache.update(self.layer.name, self.batch, self.tokens, joint.view_as(self.tokens.mask))
            if cache.backward != (backward := backward_id()):  # the callbacks of one that raises are never called
                cache.backward = backward
                after_backward(cache.learn)


class SharedDraw:
    """One draw, which the tape notes with the storage of the input it was made for."""

    def __init__(self, layer: Layer, x: Tensor, batch: Batch) -> None:
        tokens, drawing = batch.tokens(x), drawing_for(x)
        draw = layer.sampler.draw(layer.name, x, tokens, batch, drawing)
        self.index: Any = None if draw is None else draw.index.int()  # the rows drawn [k]; None where all are taken
        self.scale: Any = None if draw is None else draw.scale  # their scales, fp32 [k]
        self.is_fused = drawing is FUSED_DRAWING
        self.rows: dict[torch.dtype, Tensor] = {}  # the scaled rows [k, in], where they are kept instead of the input
        self.norms = JointNorms(layer, batch, tokens)


def _shared(tape: Tape, layer: Layer, x: Tensor, batch: Batch) -> SharedDraw:
    """Return the draw for ``x``: made by the first linear that takes it, found with its storage by the others."""
    notes = tape.notes(x)
    key = batch.step, x._version, x.shape, x.stride(), x.storage_offset(), id(layer.sampler)
    if key not in notes:
        with no_modes():  # what a draw computes is its own, and small
            notes[key] = SharedDraw(layer, x, batch)
    return notes[key]


class _SampledLinear(torch.autograd.Function):
    """``z = h Wᵀ + b``; ``kept`` is h itself, or the scaled rows of it that were drawn."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, bias: Tensor | None, kept: Tensor, shared: SharedDraw, is_conv1d: bool
    ) -> Tensor:
        ctx.norms, ctx.is_conv1d, ctx.is_fused = shared.norms, is_conv1d, shared.is_fused
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight, kept, shared.index, shared.scale if kept is h else None)
        shared.norms.users = shared.norms.waiting = shared.norms.users + 1
        return F.linear(h, weight.t() if is_conv1d else weight, bias)

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None) -> tuple[Tensor | None, ...]:
        if dz is None:
            ctx.norms.learn(None)
        return _SampledLinear.gradients(ctx, dz)

    @staticmethod
    @once_differentiable
    def gradients(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        weight, rows, index, scale = ctx.saved_tensors
        flat = dz.reshape(-1, dz.shape[-1])
        dh = dw = db = None
        if ctx.needs_input_grad[0]:
            dh = (flat @ (weight.t() if ctx.is_conv1d else weight)).view(*dz.shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            if scale is not None:
                rows = _scaled(rows, index, scale, ctx.is_fused)
            drawn = flat.index_select(0, index)
            dw = rows.t() @ drawn if ctx.is_conv1d else drawn.t() @ rows
        if ctx.needs_input_grad[2]:
            db = flat.sum(0)
        ctx.norms.learn(flat.detach())
        return dh, dw, db, None, None, None


def _scaled(h: Tensor, index: Tensor, scale: Tensor, is_fused: bool) -> Tensor:
    """Return the drawn rows of ``h`` ``[*, in]``, each times its scale, ``[k, in]``."""
    flat = h.reshape(-1, h.shape[-1])
    if is_fused:
        return kernels().gather_rows(flat, index, scale)
    return (flat.index_select(0, index) * scale[:, None]).to(h.dtype)


def _wta_crs(module: Any, patch: Any, x: Tensor) -> Tensor:
    layer: Layer | None = module.__dict__.get(LAYER)
    batch, tape = None if layer is None else layer.sampler.batch, current()
    if layer is None or batch is None or tape is None or x.dim() < 2 or is_parametrized(module):
        return patch.stock.forward(module, x)
    is_named = patch.value.targets is not None or not layer.name  # a layer that was patched by itself
    if (
        not (module.training and module.weight.requires_grad)
        or (not is_named and (not x.requires_grad or not cost(tape, x)))  # all of x is kept, or had for nothing
        or (shared := _shared(tape, layer, x, batch)).index is None
    ):
        return patch.stock.forward(module, x)
    h = autocast_low(x)
    kept = _kept(tape, h, shared)
    if kept is h and not is_named:
        return patch.stock.forward(module, h)
    weight, bias = autocast_low(module.weight), autocast_low(module.bias)
    return _SampledLinear.apply(h, weight, bias, kept, shared, hasattr(module, "nf"))


def _kept(tape: Tape, h: Tensor, shared: SharedDraw) -> Tensor:
    """Return ``h`` where the tape keeps it anyway, or for fewer bytes than the drawn rows; else the scaled rows."""
    if (rows := shared.rows.get(h.dtype)) is not None:
        return rows
    # A frozen embedding's output is kept once for q, k and v, of which LoRA casts each by itself.
    if not h.requires_grad or cost(tape, h) <= len(shared.index) * h.shape[-1] * h.itemsize:
        return h
    with no_modes():
        rows = shared.rows[h.dtype] = _scaled(h.detach(), shared.index, shared.scale, shared.is_fused)
    tape.as_activation(rows)
    return rows


WTA_CRS = Op("wta_crs", _wta_crs, replaces_stock=True)
