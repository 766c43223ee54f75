r"""Blockwise codes of 8 or 4 bits an element, rounded at random so that what they decode to is unbiased.

Of each block of B elements that lie side by side in memory, with u drawn uniformly from [0, 1)::

    l = min(x)      s = (max(x) - l) / (2^b - 1)          both rounded outwards
    c = floor((x - l) / s + u)                            b bits
    x̂ = l + s c                                           E[x̂] = x,   |x̂ - x| < s,   Var[x̂] <= s² / 4

Kept per element: int8 1 + 8/256 bytes (l and s in fp32), int4 1/2 + 4/64 (in bf16); of fp64, l and s in fp64.
E[x̂] = x holds up to the rounding of x̂ to x's dtype. So a gradient is unbiased only where x enters it linearly: the
weight gradient of a linear that keeps its own input, or rows of it. What reads x through a norm, an activation, a
product with another code or SDPA's softmax is approximate.

A mixed block has numbers that this cannot code: inf, NaN, or two groups so far apart that nothing is left of the one
that is nearer to 0 (scores beside a mask's -1e9). As many bytes code it. With R, K and J of its :class:`Format`, [a, b]
the range of the finite numbers, or of the nearer group, and M the far end of the other one::

    s = 2^k >= (b - a) / (R - 2),  n = floor(a / s)       in place of l and s: M, and -s (3/2 + n ε), which is below 0
    c = 0 … R-1             x̂ = s (n + c)                 of the numbers in [a, b]
        R … R+K-1           x̂ = s n + (M - s n) j / J     j = c - R - K + 1 + J: of the other group; M stays M
        R+K, +1, +2         -inf, NaN, inf                stay as they are

Unbiased, too, and finite numbers stay finite. Of two groups neither has a coarser step than before; of one, s is up to
4.2 times (b - a) / (2^b - 1). int4 cuts numbers beyond bf16's largest off there, by 2^-8 of themselves at most.

Stochastic rounding as in ActNN (Chen et al., 2021, arXiv:2104.14129); for sampled rows: Liu et al. (2023), Quant@8bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_memsave.device import has_numbers, waits


class Format(NamedTuple):
    """Bits of a code, elements of a block, and the dtype of its two bounds; R, K and J of a mixed block."""

    bits: int
    block: int
    bounds: torch.dtype
    near: int
    far: int
    steps: int


FORMATS = {
    "int8": Format(8, 256, torch.float32, near=124, far=129, steps=256),
    "int4": Format(4, 64, torch.bfloat16, near=11, far=2, steps=16),
}
#: Elements that a device codes at once, a multiple of every block, or a sixteenth of a tensor, if that is more: what
#: temporaries take makes a peak, and each piece takes as many launches.
PIECE, PIECES = 2**18, 16


def encode(flat: Tensor, form: Format, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Return the code of ``flat`` ``[n]``: uint8 ``[blocks, block * bits / 8]``, and l and s ``[blocks, 2]``."""
    pieces = [_encode(piece, form, generator) for piece in flat.split(_piece(flat))]
    if len(pieces) == 1:
        return pieces[0]
    codes, bounds = zip(*pieces, strict=True)
    return torch.cat(codes), torch.cat(bounds)


def _piece(flat: Tensor, share: int = 1) -> int:
    """Return how many of ``flat``, ``share`` elements each, go at once: all, unless both codings are computed."""
    if has_numbers(flat) and not waits(flat):
        return max(1, flat.numel())
    return max(PIECE, PIECE * -(-flat.numel() * share // (PIECES * PIECE))) // share


def _encode(flat: Tensor, form: Format, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    x = flat.to(torch.promote_types(flat.dtype, torch.float32))
    if rest := -x.numel() % form.block:
        x = torch.cat([x, x[-1:].expand(rest)])
    x = x.view(-1, form.block)
    dtype = form.bounds if x.dtype is torch.float32 else x.dtype
    low, high = torch.aminmax(x, dim=1, keepdim=True)
    is_mixed, *groups = _groups(x, low.isfinite() & high.isfinite(), form)
    slack, most = torch.finfo(dtype).eps, 2**form.bits - 1
    low = (low - slack * low.abs()).clamp_(min=torch.finfo(dtype).min).to(dtype)
    half = torch.where((high - low.to(x.dtype)).isinf(), 0.5, 1.0).to(x.dtype)  # what overflows, in two steps
    scale = ((high * half - low.to(x.dtype) * half) * ((1 + slack) / most) / half).to(dtype)
    scale = scale.clamp_(min=0)  # below 0 it would mark a mixed block: bounds that were cut off may cross
    u = torch.rand(x.shape, generator=generator, device=x.device)
    codes = torch.addcmul(-half * low, x, half).div_(half * scale).nan_to_num_(0.0, most, 0.0)
    codes = codes.add_(u).floor_().clamp_(0, most)
    codes, bounds = codes.to(torch.uint8), torch.cat([low, scale], dim=1)
    if _may_hold(is_mixed):
        mixed, others = _encode_mixed(x, u, groups, form, dtype, torch.finfo(flat.dtype).max)
        codes, bounds = mixed.where(is_mixed, codes), others.where(is_mixed, bounds)
    if form.bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return codes, bounds


def decode(codes: Tensor, bounds: Tensor, form: Format, numel: int, dtype: torch.dtype) -> Tensor:
    """Return the ``numel`` elements that :func:`encode` coded, in ``dtype``, on a storage of their own size."""
    rows = _piece(codes[:, 0], form.block)
    if rows >= len(codes):
        return _decode(codes, bounds, form, numel, dtype)
    size = rows * form.block
    parts = enumerate(zip(codes.split(rows), bounds.split(rows), strict=True))
    return torch.cat([_decode(c, b, form, min(size, numel - i * size), dtype) for i, (c, b) in parts])


def _decode(codes: Tensor, bounds: Tensor, form: Format, numel: int, dtype: torch.dtype) -> Tensor:
    if form.bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
    low, scale = bounds.to(torch.promote_types(dtype, torch.float32)).unsqueeze(2).unbind(1)
    finite, wide, is_mixed = torch.finfo(dtype), torch.finfo(scale.dtype), scale < 0
    overflows = (scale * (2**form.bits - 1)).isinf()
    n = torch.where(overflows, 1.0 - 2 ** (form.bits - 1), 0.0).to(scale.dtype)  # from the middle neither half does
    low = low - n * scale
    if has_mixed := _may_hold(is_mixed):
        step, end = _power(-scale, up=False), low.clamp(finite.min, finite.max)
        first = (-scale / step - 1.5) / torch.finfo(bounds.dtype).eps
        n, scale, low = first.where(is_mixed, n), step.where(is_mixed, scale), low.where(~is_mixed, 0.0)
    x = (codes + n).mul_(scale).add_(low)
    if has_mixed:
        first = (first * step).clamp(min=wide.min)
        share = (codes - (form.near + form.far - 1.0 - form.steps)) / form.steps
        x = torch.where(is_mixed & (codes >= form.near), first * (1 - share) + end * share, x)
    x.clamp_(max(finite.min, wide.min), min(finite.max, wide.max))  # the bounds' slack must not overflow; NaN stays
    if has_mixed:
        special = codes - (form.near + form.far + 1.0)  # -1 times infinity, 0 times, once
        x = torch.where(is_mixed & (special >= -1), special * torch.inf, x)
    return x.view(-1)[:numel].to(dtype, copy=numel % form.block > 0)


def _groups(x: Tensor, is_finite: Tensor, form: Format) -> tuple[Tensor, ...]:
    """Return of each block ``[blocks, 1]``: whether it is mixed, a, b and M, the middle, and the side of M's group."""
    if _may_hold(~is_finite):
        low, high = x.where(x.isfinite(), torch.inf), x.where(x.isfinite(), -torch.inf)
        low, high = low.amin(1, keepdim=True), high.amax(1, keepdim=True)
        low, high = low.where(low <= high, 0.0), high.where(low <= high, 0.0)
        x = x.where(x.isfinite(), low)
    else:
        low, high = torch.aminmax(x, dim=1, keepdim=True)
    middle, step = low / 2 + high / 2, high / form.steps - low / form.steps
    is_above = x > middle
    below = low.where(is_above, x).amax(1, keepdim=True)
    above = x.where(is_above, high).amin(1, keepdim=True)
    is_low = high > -low  # which one is nearer to 0, and needs finer steps
    near, far = below - low, high - above
    near, far = near.where(is_low, far), far.where(is_low, near)
    # The side is 1 if numbers above the middle are of M's group, 0 if others are, and -1 if there is one group.
    has_two = (near < step) & (far <= (form.far - 1) * step)
    nearer = above.where(has_two & ~is_low, low), below.where(has_two & is_low, high)
    return has_two | ~is_finite, *nearer, high.where(is_low, low), middle, is_low.int().where(has_two, -1)


def _encode_mixed(
    x: Tensor, u: Tensor, groups: list[Tensor], form: Format, dtype: torch.dtype, largest: float
) -> tuple[Tensor, Tensor]:
    """Return codes of mixed blocks, and what is kept in place of l and s; ``largest``: the largest of x's own dtype."""
    low, high, end, middle, beyond = groups
    wide, eps, room = torch.finfo(x.dtype), torch.finfo(dtype).eps, form.near - 2
    step = torch.maximum(high / room - low / room, low.abs() * (eps / (0.5 - eps)))  # so that |n| eps < 1/2
    step = _power(step.clamp(min=wide.tiny), up=True)
    n = torch.floor(low / step)
    first = (n * step).clamp(min=wide.min)
    if dtype is torch.bfloat16:  # rounded outwards
        away = ((end > first) == (end > 0)).int() * 0xFFFF
        end = ((end.view(torch.int32) + away) & ~0xFFFF).view(x.dtype)
    bounds = torch.cat([end, step * (-1.5 - n * eps)], dim=1).to(dtype)
    end = end.clamp(-largest, largest)
    far = ((x / 2 - first / 2) / (end / 2 - first / 2)).mul_(form.steps).add_(u).floor_()
    far = far.clamp_(form.steps - form.far + 1, form.steps).add_(form.near + form.far - 1 - form.steps)
    codes = (x / step).sub_(n).add_(u).floor_().clamp_(0, form.near - 1)
    codes = far.where((x > middle) == beyond, codes)
    special = x.clamp(-1, 1).nan_to_num_(0.0).add_(form.near + form.far + 1)
    return codes.where(x.isfinite(), special).to(torch.uint8), bounds


def _may_hold(flags: Tensor) -> bool:
    """Return whether a flag may be true: the host looks where it need not wait."""
    return not has_numbers(flags) or waits(flags) or bool(flags.any())


def _power(x: Tensor, up: bool) -> Tensor:
    """Return the power of two next to each number (positive, normal): not below it if ``up``, else not above."""
    bits = {torch.float32: (torch.int32, 2**23 - 1), torch.float64: (torch.int64, 2**52 - 1)}
    integer, rest = bits[x.dtype]
    return ((x.view(integer) + up * rest) & ~rest).view(x.dtype)
