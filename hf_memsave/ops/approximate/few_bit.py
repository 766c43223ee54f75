r"""``few_bit``: an activation that keeps a few bits of its derivative, unless its input has to be kept anyway.

Forward, stock's own, and, for an incoming gradient dy, backward::

    y = f(x)
    c = the piece [x_i, x_i+1) that x lies in        one of 2^b
    dx = dy l_c                                      l_c: the mean of f' on the piece

The pieces are the 2^b that minimise ``Σ_i ∫ (f'(x) - l_i)² dx`` on [-10, 10].

Kept for backward::

    eager                            x, and y where it is wanted (a linear whose weight is trained, an adapter,
                                     the product of a gated MLP)
    here     x is kept already       nothing more (or x is recomputed from what is), and dx is stock's
             y is not wanted         c in b bits an element (b/16 of x's bytes in bf16), and a byte for 1024
             y is wanted             x, as the exact op: y is recomputed from it, and dx is stock's

When the activation runs, it is not known whether a later op keeps x: it keeps c, which is dropped once x is kept.
Without a tape, or with a foreign saved-tensor hook between the two, c stays.

Forward is exact. The largest error of the slope falls from .5 (1 bit) to .004 (8 bits) on [-10, 10]; beyond, the
outermost levels hold. Where x is NaN or infinite, dx is NaN, as stock's: a byte says which groups of 1024 have such an
x, and in these the last two pieces share the mean of their levels (so of 1 bit the slope is 1/2). Once differentiable.
Source: Novikov et al. (2023), FewBit, arXiv:2202.00441; levels: Section 3.
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
from torch.utils._python_dispatch import _disable_current_modes

from hf_memsave.device import has_streams
from hf_memsave.ops.approximate.inverse import ACTIVATIONS
from hf_memsave.ops.fused.codes import are_wanted
from hf_memsave.ops.fused.kernels import kernels
from hf_memsave.ops.op import once_differentiable
from hf_memsave.tape import current
from hf_memsave.tape.bits import pack_codes, unpack_codes
from hf_memsave.tape.decide import cost
from hf_memsave.tape.handles import Handle
from hf_memsave.tape.recomputed import AutocastState

#: Elements of a group; a byte a group says whether one of them is not finite.
_GROUP = 1024
#: Levels are fitted on [-RANGE, RANGE].
RANGE = 10.0
_CELLS, _SAMPLES = 1024, 100_000


class FewBit(NamedTuple):
    """The value of the activation op for ``activation="few_bit"``."""

    bits: int = 4


def few_bit(x: Tensor, name: str, forward: Callable[[Tensor], Tensor], bits: int = 4) -> Tensor:
    """Run ``forward(x)``, the activation ``name``, which backward may rerun; keep ``bits`` bits an element, or x."""
    tape, is_fused = current(), are_wanted(x)
    if tape is None or not (x.requires_grad and torch.is_grad_enabled()):
        return _FewBit.apply(x, forward, name, bits, False, is_fused)

    def code(x: Tensor) -> Handle | None:
        if cost(tape, x) <= sum(_sizes(x.numel(), bits)):
            return None  # kept anyway, or had from what is
        return tape.keep_instead(x, _codes(x, name, bits, is_fused), None)

    with tape.using(coder=code):
        y = _FewBit.apply(x, forward, name, bits, True, is_fused)
    tape.record(y, partial(AutocastState.now(x.device.type).run, forward), (x,))
    return y


def _sizes(n: int, bits: int) -> list[int]:
    """Return the bytes of n elements' codes, and of the flags of groups that are not finite."""
    return [bits * -(-n // 8), -(-n // _GROUP)]


def _codes(x: Tensor, name: str, bits: int, is_fused: bool) -> Tensor:
    boundaries, _ = on_device(name, bits, x.device)
    if is_fused:
        return kernels().few_bit_codes(x, boundaries)
    flat, last = x.contiguous().view(-1), 2**bits - 1
    codes = torch.bucketize(flat.float(), boundaries, out_int32=True, right=True).to(torch.uint8)
    is_odd = ~flat.isfinite()
    has_odd = F.pad(is_odd, (0, -len(flat) % _GROUP)).view(-1, _GROUP).any(1).view(torch.uint8)
    codes = torch.minimum(codes, last - _of_each(has_odd, len(flat))).masked_fill_(is_odd, last)
    return torch.cat([pack_codes(codes, bits).view(-1), has_odd])


def _of_each(has_odd: Tensor, n: int) -> Tensor:
    """Return for each of n elements the flag of its group."""
    return has_odd[:, None].expand(-1, _GROUP).reshape(-1)[:n]


class _FewBit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, name: str, bits: int, is_taped: bool, is_fused: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x.detach() if is_taped else _codes(x, name, bits, is_fused))
        ctx.forward, ctx.table, ctx.is_fused = forward, (name, bits), is_fused
        ctx.autocast = AutocastState.now(x.device.type)
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        if kept.is_floating_point():  # x itself: stock's own gradient
            x = kept.detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.autocast.run(ctx.forward, x)
            (dx,) = torch.autograd.grad(y, x, dy)
            return dx, *[None] * 5
        levels = on_device(ctx.table[0], ctx.table[1], dy.device)[1]
        if ctx.is_fused:
            return kernels().few_bit_backward(dy, kept, levels), *[None] * 5
        n, bits = dy.numel(), ctx.table[1]
        planes, has_odd = kept.split(_sizes(n, bits))
        codes = unpack_codes(planes.view(bits, -1), n).int() + (_of_each(has_odd, n).int() << bits)
        return (dy * levels[codes.view(dy.shape)]).to(dy.dtype), *[None] * 5


def on_device(name: str, bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return boundaries ``[2^b - 1]``, and levels ``[2^(b + 1)]`` of finite groups and then of others, float32."""
    # On CUDA they are copied there once, as a copy makes the host wait.
    return (_copied if has_streams(device) else _copied.__wrapped__)(name, bits, device)


@functools.cache
def _copied(name: str, bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    table = levels(name, bits)
    among_odd = np.append(table.levels[:-2], [table.levels[-2:].mean(), np.nan])
    both = np.append(table.levels, among_odd.astype(np.float32))
    return torch.from_numpy(table.boundaries).to(device), torch.from_numpy(both).to(device)


class Levels(NamedTuple):
    """A step function in float32: its rising boundaries ``[2^b - 1]``, and its levels between them ``[2^b]``."""

    boundaries: np.ndarray  # no tensors: cached ones would be on no device of use, and count as kept
    levels: np.ndarray


@functools.cache
def levels(name: str, bits: int) -> Levels:
    """Fit the step function nearest to an activation's derivative; 8 bits take about a second, once per process."""
    edges = np.linspace(-RANGE, RANGE, _SAMPLES + 1)
    with _disable_current_modes():  # under a mode of fake tensors there would be no numbers
        slopes = np.diff(ACTIVATIONS[name](torch.from_numpy(edges)).numpy()) / np.diff(edges)
    # Cells, the finest pieces allowed, are as dense as the best pieces for large b: |f''|^(2/3). 1024 serve 256 pieces.
    density = np.abs(np.gradient(slopes)) ** (2 / 3)
    share = np.cumsum(density + density.mean() / 10)
    inner = np.searchsorted(share / share[-1], np.linspace(0, 1, _CELLS + 1)[1:-1])
    cells = np.unique([0, _SAMPLES // 2, *inner, _SAMPLES])
    cuts = np.array([0, *_best_cuts(cells, slopes, 2**bits), _SAMPLES])
    means = np.add.reduceat(slopes, cuts[:-1]) / np.diff(cuts)
    return Levels(edges[cuts[1:-1]].astype(np.float32), means.astype(np.float32))


def _best_cuts(cells: np.ndarray, slopes: np.ndarray, pieces: int) -> list[int]:
    """Return the samples where the best ``pieces`` pieces meet, by dynamic programming over cells."""
    first = np.concatenate([[0], np.cumsum(slopes)])[cells]
    second = np.concatenate([[0], np.cumsum(slopes**2)])[cells]
    i, j = np.triu_indices(len(cells), 1)
    one = np.full((len(cells), len(cells)), np.inf)
    one[i, j] = second[j] - second[i] - (first[j] - first[i]) ** 2 / (cells[j] - cells[i])
    cost, choices = one[0], []
    for _ in range(pieces - 1):
        total = cost[:, None] + one
        choices.append(total.argmin(0))
        cost = total.min(0)
    cuts = [len(cells) - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return [int(cells[c]) for c in reversed(cuts[1:])]
