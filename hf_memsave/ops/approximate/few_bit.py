r"""``few_bit``: an activation that keeps a few bits of its derivative, unless its input has to be kept anyway.

Forward, stock's own, and, for an incoming gradient dy, backward::

    y = f(x)
    c = the piece that x lies in         one of 2^b, see :mod:`~hf_memsave.ops.approximate.few_bit_tables`
    dx = dy l_c                          l_c: the mean of f' on the piece

Kept for backward::

    eager                            x, and y where it is wanted (a linear whose weight is trained, an adapter,
                                     the product of a gated MLP)
    here     x is kept already       nothing more (or it is promised from what is), and dx is stock's
             y is not wanted         c in b bits an element (b/16 of x's bytes in bf16), and a byte for 1024
             y is wanted             x, as the exact op: y is promised from it, c gives way, and dx is stock's

So it saves where the next linear is frozen, and costs nothing where y is wanted. What comes later is not known when
the activation runs: it keeps c, which gives way when x is kept, to make y from or for itself. Without a tape, or with a
foreign hook between the two, c stays.

Forward is exact. The largest error of the slope falls from .5 (1 bit) to .004 (8 bits) on [-10, 10], see
scripts/results/inverse-derivatives.md. Beyond, the outermost levels hold. Where x is NaN or
infinite, dx is NaN, as stock's: a byte says which groups of 1024 have such an x, and in these the last two pieces share
the mean of their levels (so of 1 bit the slope is 1/2). Once differentiable.
Source: Novikov et al. (2023), FewBit, arXiv:2202.00441.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_memsave.device import has_streams
from hf_memsave.ops.approximate.few_bit_tables import check_bits, levels
from hf_memsave.ops.fused.codes import are_wanted
from hf_memsave.ops.fused.kernels import kernels
from hf_memsave.ops.op import once_differentiable
from hf_memsave.tape import current
from hf_memsave.tape.again import AutocastState, run_under
from hf_memsave.tape.codecs import pack_codes, unpack_codes
from hf_memsave.tape.content import Handle

#: Elements that share the byte that says whether one of them is not finite.
_GROUP = 1024


class FewBit(NamedTuple):
    """What an op is given where ``activation="few_bit"`` was chosen."""

    bits: int = 4


def _nbytes(n: int, bits: int) -> int:
    return bits * -(-n // 8) + -(-n // _GROUP)


def few_bit(x: Tensor, name: str, forward: Callable[[Tensor], Tensor], bits: int = 4) -> Tensor:
    """``forward(x)``, the activation ``name``, which backward may call again; keeps ``bits`` bits an element, or x."""
    check_bits(bits)
    tape = current()
    is_fused = are_wanted(x)
    if tape is None or not (x.requires_grad and torch.is_grad_enabled()):
        return _FewBit.apply(x, forward, name, bits, False, is_fused)

    def code(x: Tensor) -> Handle | None:
        if tape.cost(x) <= _nbytes(x.numel(), bits):
            return None  # kept anyway, or had from what is
        return tape.stand_in(x, _codes(x, name, bits, is_fused), None)

    before, tape.coder = tape.coder, code
    try:
        y = _FewBit.apply(x, forward, name, bits, True, is_fused)
    finally:
        tape.coder = before
    tape.record(y, partial(run_under, AutocastState(x.device.type), forward), (x,))
    return y


def _codes(x: Tensor, name: str, bits: int, is_fused: bool) -> Tensor:
    boundaries, _ = on_device(name, bits, x.device)
    if is_fused:
        packed: Tensor = kernels().few_bit_codes(x, boundaries)
        return packed
    flat, last = x.contiguous().view(-1), 2**bits - 1
    codes = torch.bucketize(flat.float(), boundaries, out_int32=True, right=True).to(torch.uint8)
    is_odd = ~flat.isfinite()
    has_odd = F.pad(is_odd, (0, -len(flat) % _GROUP)).view(-1, _GROUP).any(1).view(torch.uint8)
    codes = torch.minimum(codes, last - _of_each(has_odd, len(flat))).masked_fill_(is_odd, last)
    return torch.cat([pack_codes(codes, bits).view(-1), has_odd])


def _of_each(has_odd: Tensor, n: int) -> Tensor:
    """For each of n elements, what there is for each group."""
    return has_odd[:, None].expand(-1, _GROUP).reshape(-1)[:n]


def on_device(name: str, bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Boundaries ``[2^b - 1]``, and levels ``[2^(b + 1)]`` of finite groups and of others, float32."""
    # On CUDA they are copied there once, as a copy makes the host wait.
    return _copied(name, bits, device) if has_streams(device) else _as_tensors(name, bits, device)


def _as_tensors(name: str, bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    table = levels(name, bits)
    among_odd = np.append(table.levels[:-2], [table.levels[-2:].mean(), np.nan])
    both = np.append(table.levels, among_odd.astype(np.float32))
    return torch.from_numpy(table.boundaries).to(device), torch.from_numpy(both).to(device)


_copied = functools.cache(_as_tensors)


class _FewBit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], name: str, bits: int, is_taped: bool, is_fused: bool
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x.detach() if is_taped else _codes(x, name, bits, is_fused))
        ctx.forward, ctx.table, ctx.is_fused = forward, (name, bits), is_fused
        ctx.autocast = AutocastState(x.device.type)
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        if kept.is_floating_point():  # x itself: stock's own gradient
            x = kept.detach().requires_grad_()
            with torch.enable_grad():
                y = run_under(ctx.autocast, ctx.forward, x)
            (dx,) = torch.autograd.grad(y, x, dy)
            return dx, *[None] * 5
        levels = on_device(ctx.table[0], ctx.table[1], dy.device)[1]
        if ctx.is_fused:
            return kernels().few_bit_backward(dy, kept, levels), *[None] * 5
        n, bits = dy.numel(), ctx.table[1]
        planes, has_odd = kept.split([bits * -(-n // 8), -(-n // _GROUP)])
        codes = unpack_codes(planes.view(bits, -1), n).int() + (_of_each(has_odd, n).int() << bits)
        return (dy * levels[codes.view(dy.shape)]).to(dy.dtype), *[None] * 5
