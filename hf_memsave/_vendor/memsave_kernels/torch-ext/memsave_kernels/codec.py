r"""Blockwise codes of 8 or 4 bits an element, rounded at random, in the format of hf_memsave's quantized storage.

Of each block of B elements, with u drawn uniformly from [0, 1), in steps of 2⁻²⁴::

    l = min(x)      s = (max(x) - l) / (2^b - 1)          both rounded outwards
    c = floor((x - l) / s + u)
    x̂ = l + s c                                           E[x̂] = x

================  ====  =====  =========  ===  ===  ===
name              bits  block  l and s    R    K    J
================  ====  =====  =========  ===  ===  ===
``"int8"``        8     256    float32    124  129  256
``"int4"``        4     64     bfloat16   11   2    16
================  ====  =====  =========  ===  ===  ===

Blocks of what this cannot code are mixed: with inf, NaN, or two groups on either side of the middle so far apart that
nothing is left of the one that is nearer to 0. With [a, b] the range of the finite numbers, or of the nearer group, and
M the far end of the other one::

    s = 2^k >= (b - a) / (R - 2),  n = floor(a / s)       in place of l and s: M, and -s (3/2 + n eps), which is below 0
    c = 0 … R-1             x̂ = s (n + c)                 of the numbers in [a, b]
        R … R+K-1           x̂ = s n + (M - s n) j / J     j = c - R - K + 1 + J: of the other group; M stays M
        R+K, +1, +2         -inf, NaN, inf                stay as they are

Bytes an element in half precision: encode 2 + b/8, decode 2 + b/8, and the bounds. Source: Chen et al. (2021),
arXiv:2104.14129.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._define import define
from ._dropout import uniform
from ._launch import Long, ceil_div, dense, launch


class Format(NamedTuple):
    """Bits of a code, elements of a block, and the dtype of its bounds; R, K and J of a mixed block."""

    bits: int
    block: int
    bounds: torch.dtype
    near: int
    far: int
    steps: int

    def constants(self, dtype: torch.dtype, blocks: int) -> dict[str, Any]:
        """Of the kernels, for tensors in ``dtype``."""
        eps, largest = torch.finfo(self.bounds).eps, torch.finfo(dtype).max
        return {"BITS": self.bits, "NEAR": self.near, "FAR": self.far, "STEPS": self.steps, "EPS": eps,
                "LARGEST": largest, "BLOCKS": blocks, "B": self.block}  # fmt: skip


FORMATS = {
    "int8": Format(8, 256, torch.float32, near=124, far=129, steps=256),
    "int4": Format(4, 64, torch.bfloat16, near=11, far=2, steps=16),
}
_ELEMENTS = 2048


@triton.jit
def _inverse(power):
    """Of a power of two, exactly."""
    return ((254 << 23) - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _groups(x, low, high, FAR: tl.constexpr, STEPS: tl.constexpr):
    """Whether blocks have two groups, and the inner ends of those; for finite x."""
    is_above, step = x > low / 2 + high / 2, high / STEPS - low / STEPS
    below = tl.max(tl.where(is_above, low, x), axis=1, keep_dims=True)
    above = tl.min(tl.where(is_above, x, high), axis=1, keep_dims=True)
    is_low, near, far = high > -low, below - low, high - above
    two = (tl.where(is_low, near, far) < step) & (tl.where(is_low, far, near) <= (FAR - 1) * step)
    return two, below, above


@triton.jit
def _mixed(
    x, u, low, high, two, below, above, dtype, NEAR: tl.constexpr, FAR: tl.constexpr, STEPS: tl.constexpr,
    EPS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """The codes and bounds of mixed blocks."""
    middle, is_low = low / 2 + high / 2, high > -low
    end = tl.where(is_low, high, low)
    low, high = tl.where(two & (is_low == 0), above, low), tl.where(two & is_low, below, high)
    step = tl.maximum(high / (NEAR - 2) - low / (NEAR - 2), tl.abs(low) * (EPS / (0.5 - EPS)))
    step = tl.maximum(step, 1.1754943508222875e-38).to(tl.int32, bitcast=True)
    step = ((step + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True)
    n = tl.floor(low * _inverse(step))
    first = tl.maximum(n * step, -3.4028234663852886e38)
    if dtype == tl.bfloat16:  # rounded outwards
        away = tl.where((end > first) == (end > 0), 0xFFFF, 0)
        end = ((end.to(tl.int32, bitcast=True) + away) & -0x10000).to(tl.float32, bitcast=True)
    used = tl.minimum(tl.maximum(end, -LARGEST), LARGEST)
    each = tl.where(two, STEPS / (used / 2 - first / 2), 0.0)
    j = tl.maximum(tl.floor((x / 2 - first / 2) * each + u), STEPS - FAR + 1.0)
    j = tl.where(x == used, STEPS * 1.0, tl.minimum(j, STEPS * 1.0)) + (NEAR + FAR - 1.0 - STEPS)
    code = tl.minimum(tl.maximum(tl.floor(x * _inverse(step) - n + u), 0.0), NEAR - 1.0)
    code = tl.where(two & ((x > middle) == is_low), j, code)
    special = NEAR + FAR + tl.where(x == x, tl.where(x > 0, 2.0, 0.0), 1.0)
    return tl.where(tl.abs(x) < float("inf"), code, special), end, step * (-1.5 - n * EPS)


@triton.jit(do_not_specialize=["seed"])
def encode_kernel(
    x_ptr, codes_ptr, bounds_ptr, seed: tl.int64, n, blocks, BITS: tl.constexpr, NEAR: tl.constexpr,
    FAR: tl.constexpr, STEPS: tl.constexpr, EPS: tl.constexpr, LARGEST: tl.constexpr, BLOCKS: tl.constexpr,
    B: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """The codes and the bounds of BLOCKS blocks; what is beyond n repeats the last element."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    at = block * B + tl.arange(0, B)[None, :]
    is_block = block < blocks
    x = tl.load(x_ptr + at, mask=at < n, other=tl.load(x_ptr + n - 1)).to(tl.float32)
    is_finite = tl.abs(x) < float("inf")
    low = tl.min(tl.where(is_finite, x, float("inf")), axis=1, keep_dims=True)
    high = tl.max(tl.where(is_finite, x, float("-inf")), axis=1, keep_dims=True)
    low, high = tl.where(low <= high, low, 0.0), tl.where(low <= high, high, 0.0)
    two, below, above = _groups(tl.where(is_finite, x, low), low, high, FAR, STEPS)
    is_mixed = two | (tl.max(tl.where(is_finite, 0, 1), axis=1, keep_dims=True) > 0)
    dtype: tl.constexpr = bounds_ptr.dtype.element_ty
    most: tl.constexpr = 2**BITS - 1
    u = uniform(seed, block, BLOCKS, B)
    first = tl.maximum(low - EPS * tl.abs(low), LEAST).to(dtype).to(tl.float32)
    half = tl.where(tl.abs(high - first) < float("inf"), 1.0, 0.5)
    scale = ((high * half - first * half) * ((1 + EPS) / most) / half).to(dtype).to(tl.float32)
    code = tl.floor(tl.where(scale > 0, (half * x - half * first) / (half * scale), 0.0) + u)
    code = tl.minimum(tl.maximum(code, 0.0), most * 1.0)
    if tl.max(is_mixed.to(tl.int32)) > 0:
        others, end, negative = _mixed(
            x, u, low, high, two, below, above, dtype, NEAR, FAR, STEPS, EPS, LARGEST
        )  # fmt: skip
        code = tl.where(is_mixed, others, code)
        first, scale = tl.where(is_mixed, end, first), tl.where(is_mixed, negative, scale)
    code = code.to(tl.int32)
    tl.store(bounds_ptr + 2 * block, first, mask=is_block)
    tl.store(bounds_ptr + 2 * block + 1, scale, mask=is_block)
    if BITS == 8:
        tl.store(codes_ptr + at, code.to(tl.uint8), mask=is_block & (at >= 0))
    else:
        pairs = tl.reshape(code, [BLOCKS, B // 2, 2]) << (4 * tl.arange(0, 2))[None, None, :]
        byte = block * (B // 2) + tl.arange(0, B // 2)[None, :]
        tl.store(codes_ptr + byte, tl.sum(pairs, axis=2).to(tl.uint8), mask=is_block & (byte >= 0))


@triton.jit
def decode_kernel(
    codes_ptr, bounds_ptr, x_ptr, n, blocks, BITS: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    STEPS: tl.constexpr, EPS: tl.constexpr, LARGEST: tl.constexpr, BLOCKS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The elements of BLOCKS blocks."""
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
    is_mixed, code, end = scale < 0, code.to(tl.float32), tl.minimum(tl.maximum(low, -LARGEST), LARGEST)
    step = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    middle = tl.where(tl.abs(scale * (2**BITS - 1)) < float("inf"), 0.0, 1.0 - 2 ** (BITS - 1))
    first = (-scale * _inverse(step) - 1.5) / EPS
    low = tl.where(is_mixed, 0.0, low - middle * scale)
    x = (code + tl.where(is_mixed, first, middle)) * tl.where(is_mixed, step, scale) + low
    first, share = tl.maximum(first * step, -3.4028234663852886e38), (code - (NEAR + FAR - 1.0 - STEPS)) / STEPS
    x = tl.where(is_mixed & (code >= NEAR), first * (1 - share) + end * share, x)
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    special = code - (NEAR + FAR + 1.0)  # -1 times infinity, 0 times, once
    x = tl.where(is_mixed & (special >= -1), special * float("inf"), x)
    tl.store(x_ptr + at, x, mask=at < n)


def _encode(x: Tensor, name: str, seed: int) -> tuple[Tensor, Tensor]:
    codes, bounds = _encode_fake(x, name, seed)
    form, blocks = FORMATS[name], codes.shape[0]
    each = _ELEMENTS // form.block
    launch(
        encode_kernel, (ceil_div(blocks, each),), (x.contiguous(), codes, bounds, Long(seed), x.numel(), blocks),
        form.constants(x.dtype, each) | {"LEAST": torch.finfo(form.bounds).min},
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
    args = (*dense(codes, bounds), x, n, blocks)
    launch(decode_kernel, (ceil_div(blocks, each),), args, form.constants(dtype, each))
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
