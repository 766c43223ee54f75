r"""Blockwise codes of 8 or 4 bits an element, rounded at random, in the format of hf_memsave's quantized storage.

Of each block of B elements, with u drawn uniformly from [0, 1), in steps of 2⁻²⁴::

    l = min(x)      s = (max(x) - l) / (2^b - 1)          both rounded outwards
    c = floor((x - l) / s + u)
    x̂ = l + s c                                           E[x̂] = x

================  ====  =====  =========
name              bits  block  l and s
================  ====  =====  =========
``"int8"``        8     256    float32
``"int4"``        4     64     bfloat16
================  ====  =====  =========

What is not finite makes NaNs of its block. Bytes an element in half precision: encode 2 + b/8, decode 2 + b/8, and the
bounds. Source: Chen et al. (2021), arXiv:2104.14129.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._dropout import uniform
from ._launch import Long, ceil_div, dense, launch
from ._ops import define


class Format(NamedTuple):
    """Bits of a code, elements of a block, and the dtype of its bounds."""

    bits: int
    block: int
    bounds: torch.dtype


FORMATS = {"int8": Format(8, 256, torch.float32), "int4": Format(4, 64, torch.bfloat16)}
_ELEMENTS = 2048


@triton.jit(do_not_specialize=["seed"])
def encode_kernel(
    x_ptr, codes_ptr, bounds_ptr, seed: tl.int64, n, blocks, BITS: tl.constexpr, SLACK: tl.constexpr,
    LEAST: tl.constexpr, BLOCKS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The codes and the bounds of BLOCKS blocks; what is beyond n repeats the last element."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    at = block * B + tl.arange(0, B)[None, :]
    is_block = block < blocks
    x = tl.load(x_ptr + at, mask=at < n, other=tl.load(x_ptr + n - 1)).to(tl.float32)
    is_finite = tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), axis=1, keep_dims=True) == 0
    low, high = tl.min(x, axis=1, keep_dims=True), tl.max(x, axis=1, keep_dims=True)
    most: tl.constexpr = 2**BITS - 1
    low = tl.maximum(low - SLACK * tl.abs(low), LEAST).to(bounds_ptr.dtype.element_ty).to(tl.float32)
    half = tl.where(tl.abs(high - low) < float("inf"), 1.0, 0.5)
    scale = (high * half - low * half) * ((1 + SLACK) / most) / half
    scale = tl.where(is_finite, scale, float("nan")).to(bounds_ptr.dtype.element_ty).to(tl.float32)
    code = (half * x - half * low) / (half * scale)
    code = tl.where(scale > 0, code, 0.0)
    code = tl.floor(code + uniform(seed, block, BLOCKS, B))
    code = tl.minimum(tl.maximum(code, 0.0), most * 1.0).to(tl.int32)
    tl.store(bounds_ptr + 2 * block, low, mask=is_block)
    tl.store(bounds_ptr + 2 * block + 1, scale, mask=is_block)
    if BITS == 8:
        tl.store(codes_ptr + at, code.to(tl.uint8), mask=is_block & (at >= 0))
    else:
        pairs = tl.reshape(code, [BLOCKS, B // 2, 2]) << (4 * tl.arange(0, 2))[None, None, :]
        byte = block * (B // 2) + tl.arange(0, B // 2)[None, :]
        tl.store(codes_ptr + byte, tl.sum(pairs, axis=2).to(tl.uint8), mask=is_block & (byte >= 0))


@triton.jit
def decode_kernel(
    codes_ptr, bounds_ptr, x_ptr, n, blocks, BITS: tl.constexpr, LARGEST: tl.constexpr, BLOCKS: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """The elements of BLOCKS blocks; LARGEST is the largest number of x's dtype."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    at = block * B + tl.arange(0, B)[None, :]
    is_block = block < blocks
    low = tl.load(bounds_ptr + 2 * block, mask=is_block, other=0.0).to(tl.float32)
    scale = tl.load(bounds_ptr + 2 * block + 1, mask=is_block, other=0.0).to(tl.float32)
    if BITS == 8:
        code = tl.load(codes_ptr + at, mask=is_block & (at >= 0), other=0).to(tl.int32)
    else:
        byte = block * (B // 2) + tl.arange(0, B // 2)[None, :]
        pairs = tl.load(codes_ptr + byte, mask=is_block & (byte >= 0), other=0).to(tl.int32)
        code = tl.reshape((pairs[:, :, None] >> (4 * tl.arange(0, 2))[None, None, :]) & 15, [BLOCKS, B])
    most: tl.constexpr = 2**BITS - 1
    middle = tl.where(tl.abs(scale * most) < float("inf"), 0.0, most // 2 * 1.0)
    x = (code.to(tl.float32) - middle) * scale + (low + middle * scale)
    bounded = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    tl.store(x_ptr + at, tl.where(x == x, bounded, x), mask=at < n)


def _encode(x: Tensor, name: str, seed: int) -> tuple[Tensor, Tensor]:
    codes, bounds = _encode_fake(x, name, seed)
    form, blocks = FORMATS[name], codes.shape[0]
    each, info = _ELEMENTS // form.block, torch.finfo(form.bounds)
    launch(
        encode_kernel, (ceil_div(blocks, each),), (x.contiguous(), codes, bounds, Long(seed), x.numel(), blocks),
        {"BITS": form.bits, "SLACK": info.eps, "LEAST": info.min, "BLOCKS": each, "B": form.block},
    )  # fmt: skip
    return codes, bounds


def _encode_fake(x: Tensor, name: str, seed: int) -> tuple[Tensor, Tensor]:
    form = FORMATS[name]
    blocks = ceil_div(x.numel(), form.block)
    codes = x.new_empty(blocks, form.block * form.bits // 8, dtype=torch.uint8)
    return codes, x.new_empty(blocks, 2, dtype=form.bounds)


def _decode(codes: Tensor, bounds: Tensor, name: str, n: int, dtype: torch.dtype) -> Tensor:
    x = _decode_fake(codes, bounds, name, n, dtype)
    form, blocks = FORMATS[name], codes.shape[0]
    each = _ELEMENTS // form.block
    launch(
        decode_kernel, (ceil_div(blocks, each),), (*dense(codes, bounds), x, n, blocks),
        {"BITS": form.bits, "LARGEST": torch.finfo(dtype).max, "BLOCKS": each, "B": form.block},
    )  # fmt: skip
    return x


def _decode_fake(codes: Tensor, bounds: Tensor, name: str, n: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(n, dtype=dtype)


_encode_op = define("encode(Tensor x, str name, int seed) -> (Tensor, Tensor)", _encode, _encode_fake)
_decode_op = define(
    "decode(Tensor codes, Tensor bounds, str name, int n, ScalarType dtype) -> Tensor", _decode, _decode_fake
)


def encode(x: Tensor, name: str, seed: int) -> tuple[Tensor, Tensor]:
    """Codes a tensor.

    Args:
        x: Any shape, float32, bfloat16 or float16, read in the order of its elements.
        name: ``"int8"`` or ``"int4"``.
        seed: Of the rounding, below 2^63: from :func:`~memsave_kernels.draw_seed`.

    Returns:
        uint8 ``[blocks, block * bits / 8]``, and l and s ``[blocks, 2]``.

    Raises:
        ValueError: There is no such format.
    """
    if name not in FORMATS:
        raise ValueError(f"expected a format in {sorted(FORMATS)}, got {name!r}")
    return _encode_op(x, name, seed)


def decode(codes: Tensor, bounds: Tensor, name: str, n: int, dtype: torch.dtype) -> Tensor:
    """The n elements that :func:`encode` coded, ``[n]`` in ``dtype``."""
    return _decode_op(codes, bounds, name, n, dtype)
