"""Bits: eight booleans a byte, codes of few bits in planes of them; and the functions that pack and code."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_memsave.tape.private import dispatch_modes
from hf_memsave.tape.quantize import decode, encode

#: Most booleans that NumPy packs and unpacks: no counter of peaks sees what it allocates.
_FEW = 2**16
#: Eight bytes of 0 or 1, lowest first, times this have them as the bits of the highest byte.
_GATHER = 0x0102040810204080
#: A byte times this is eight of it, of which the other leaves bit i in byte i.
_COPY, _EACH = 0x0101010101010101, 0x8040201008040201 - 2**64


def pack_bits(flags: Tensor) -> Tensor:
    """Return ``flags`` eight to a byte, lowest bit first, as uint8 ``[ceil(numel / 8)]``; what is not zero is true."""
    if _is_quick(flags, flags.numel()):
        return torch.from_numpy(np.packbits(flags.numpy(), bitorder="little"))
    flat = flags.reshape(-1).view(torch.uint8).clamp_max(1)  # CPU compares bytes one by one
    if rest := -flat.numel() % 8:
        flat = torch.cat([flat, flat.new_zeros(rest)])
    return flat.view(torch.int64).mul_(_GATHER).__irshift__(56).to(torch.uint8)


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """Return the first ``numel`` booleans that :func:`pack_bits` packed, as bool ``[numel]``."""
    if _is_quick(packed, numel):
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=numel, bitorder="little").view(np.bool_))
    spread = packed.to(torch.int64).mul_(_COPY).__iand__(_EACH)
    flags = spread.view(torch.uint8).clamp_max_(1).view(torch.bool)
    return flags if flags.numel() == numel else flags[:numel].clone()  # on a storage of its own size


def _is_quick(x: Tensor, numel: int) -> bool:
    """Return whether to use NumPy, one call for PyTorch's five: for few elements, where no dispatch mode is on."""
    return x.is_cpu and numel <= _FEW and type(x) is Tensor and not dispatch_modes()


class Coders(NamedTuple):
    """Functions that pack and code: any of the same names and arguments, if it reads what PyTorch's own wrote."""

    pack_bits: Callable[[Tensor], Tensor] = pack_bits
    unpack_bits: Callable[..., Tensor] = unpack_bits
    encode: Callable[..., tuple[Tensor, Tensor]] = encode
    decode: Callable[..., Tensor] = decode


#: PyTorch's own functions.
CODERS = Coders()


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Return uint8 codes below 2^bits as ``[bits, *]``: :func:`pack_bits` of all lowest bits, then of all next ones."""
    return torch.stack([pack_bits((codes >> plane & 1).bool()) for plane in range(bits)])


def unpack_codes(packed: Tensor, numel: int) -> Tensor:
    """Return the first ``numel`` codes that :func:`pack_codes` packed, as uint8 ``[numel]``."""
    codes = torch.zeros(numel, dtype=torch.uint8, device=packed.device)
    for plane, row in enumerate(packed):
        codes |= unpack_bits(row, numel).to(torch.uint8) << plane
    return codes
