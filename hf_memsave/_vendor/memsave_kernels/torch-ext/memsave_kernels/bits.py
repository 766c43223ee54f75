"""Booleans in one bit each, lowest bit first: exact. Bytes an element: 1 + 1/8 each way."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._define import define
from ._launch import ceil_div, dense, launch

BLOCK = 1024
_BLOCK = 4096


@triton.jit
def packed(flags, BLOCK: tl.constexpr):
    """Eight of the 0 or 1 in ``flags`` ``[BLOCK]`` in each byte ``[BLOCK // 8]``."""
    lanes = tl.reshape(flags.to(tl.int32), [BLOCK // 8, 8]) << tl.arange(0, 8)[None, :]
    return tl.sum(lanes, axis=1).to(tl.uint8)


@triton.jit
def unpacked(ptr, size, BLOCK: tl.constexpr):
    """This program's 0 or 1 ``[BLOCK]``, from the bytes at ``ptr``, ``size`` in all."""
    byte = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    lanes = tl.load(ptr + byte, mask=byte < size, other=0).to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]
    return tl.reshape(lanes & 1, [BLOCK])


@triton.jit
def store_packed(ptr, flags, size, BLOCK: tl.constexpr):
    """Stores this program's flags ``[BLOCK]`` in its bytes, of ``size`` in all; those beyond have to be 0."""
    byte = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    tl.store(ptr + byte, packed(flags, BLOCK), mask=byte < size)


@triton.jit
def pack_bits_kernel(x_ptr, bits_ptr, n, size, BLOCK: tl.constexpr):
    """A bit for each byte that is not 0."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    store_packed(bits_ptr, tl.load(x_ptr + at, mask=at < n, other=0) != 0, size, BLOCK)


@triton.jit
def unpack_bits_kernel(bits_ptr, x_ptr, n, size, BLOCK: tl.constexpr):
    """A byte, 0 or 1, for each bit."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, unpacked(bits_ptr, size, BLOCK).to(tl.uint8), mask=at < n)


def _pack(flags: Tensor) -> Tensor:
    bits = _pack_fake(flags)
    args: tuple[Any, ...] = (flags.contiguous().view(torch.uint8), bits, flags.numel(), bits.numel())
    launch(pack_bits_kernel, (ceil_div(flags.numel(), _BLOCK),), args, {"BLOCK": _BLOCK})
    return bits


def _pack_fake(flags: Tensor) -> Tensor:
    return flags.new_empty(ceil_div(flags.numel(), 8), dtype=torch.uint8)


def _unpack(bits: Tensor, n: int) -> Tensor:
    flags = _unpack_fake(bits, n)
    args = (*dense(bits), flags.view(torch.uint8), n, bits.numel())
    launch(unpack_bits_kernel, (ceil_div(n, _BLOCK),), args, {"BLOCK": _BLOCK})
    return flags


def _unpack_fake(bits: Tensor, n: int) -> Tensor:
    return bits.new_empty(n, dtype=torch.bool)


_pack_op = define("pack_bits(Tensor flags) -> Tensor", _pack, _pack_fake)
_unpack_op = define("unpack_bits(Tensor bits, int n) -> Tensor", _unpack, _unpack_fake)


def pack_bits(flags: Tensor) -> Tensor:
    """Eight booleans a byte.

    Args:
        flags: Bool, any shape, read in the order of its elements; whatever is not 0 is true.

    Returns:
        uint8 ``[ceil(n / 8)]``.
    """
    return _pack_op(flags)


def unpack_bits(bits: Tensor, n: int) -> Tensor:
    """The first n booleans that :func:`pack_bits` packed: bool ``[n]``."""
    return _unpack_op(bits, n)
