r"""Blockwise codes of 8 or 4 bits an element, rounded at random so that what they decode to is unbiased.

Of each block of B elements that lie side by side in memory, with u drawn uniformly from [0, 1)::

    l = min(x)      s = (max(x) - l) / (2^b - 1)          both rounded outwards
    c = floor((x - l) / s + u)                            b bits
    x̂ = l + s c                                           E[x̂] = x,   |x̂ - x| < s,   Var[x̂] <= s² / 4

Kept per element: int8 1 + 8/256 bytes (l and s in fp32), int4 1/2 + 4/64 (in bf16). E[x̂] = x holds up to the rounding
of x̂ to x's dtype. So a gradient is unbiased only where x enters it linearly: the weight gradient of a linear that keeps
its own input, or rows of it. What reads x through a norm, an activation, a product with another code or SDPA's softmax
is approximate. What is not finite in fp32 makes NaNs of its block.

Stochastic rounding as in ActNN (Chen et al., 2021, arXiv:2104.14129); for sampled rows: Liu et al. (2023), Quant@8bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Format(NamedTuple):
    """Bits of a code, elements of a block, and the dtype of its two bounds."""

    bits: int
    block: int
    bounds: torch.dtype


FORMATS = {"int8": Format(8, 256, torch.float32), "int4": Format(4, 64, torch.bfloat16)}


def encode(flat: Tensor, form: Format, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """The code of ``flat`` ``[n]``: uint8 ``[blocks, block * bits / 8]``, and l and s ``[blocks, 2]``."""
    x = flat.float()
    if rest := -x.numel() % form.block:
        x = torch.cat([x, x[-1:].expand(rest)])
    x = x.view(-1, form.block)
    low, high = torch.aminmax(x, dim=1, keepdim=True)
    slack, most = torch.finfo(form.bounds).eps, 2**form.bits - 1
    is_finite = low.isfinite() & high.isfinite()
    low = (low - slack * low.abs()).clamp_(min=torch.finfo(form.bounds).min).to(form.bounds)
    half = torch.where((high - low.float()).isinf(), 0.5, 1.0)  # a distance beyond what fp32 has, in two steps
    scale = ((high * half - low.float() * half) * ((1 + slack) / most) / half).to(form.bounds)
    scale.masked_fill_(~is_finite, torch.nan)
    codes = torch.addcmul(-half * low, x, half).div_(half * scale).nan_to_num_(0.0, most, 0.0)
    codes = codes.add_(torch.rand(x.shape, generator=generator, device=x.device)).floor_().clamp_(0, most)
    codes = codes.to(torch.uint8)
    if form.bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return codes, torch.cat([low, scale], dim=1)


def decode(codes: Tensor, bounds: Tensor, form: Format, numel: int, dtype: torch.dtype) -> Tensor:
    """The ``numel`` elements that :func:`encode` coded, in ``dtype``, on a storage of their own size."""
    if form.bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
    low, scale = bounds.float().unsqueeze(2).unbind(1)
    most = 2**form.bits - 1
    middle = torch.where((scale * most).isinf(), float(most // 2), 0.0)  # neither half is beyond what fp32 has
    x = (codes - middle).mul_(scale).add_(low + middle * scale).view(-1)[:numel]
    finite = torch.finfo(dtype)  # the bounds' slack must not overflow; NaN stays
    x.clamp_(max(finite.min, torch.finfo(x.dtype).min), min(finite.max, torch.finfo(x.dtype).max))
    return x.to(dtype, copy=numel % form.block > 0)
