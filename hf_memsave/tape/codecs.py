"""Codecs: a promise that stores fewer bytes."""

import torch
from torch import Tensor

_BITS = 8


def pack_bits(flags: Tensor) -> Tensor:
    """Eight booleans a byte, lowest bit first.

    Args:
        flags: Boolean, any shape; read in the order of its elements.

    Returns:
        uint8 ``[ceil(numel / 8)]``.
    """
    flat = flags.reshape(-1).view(torch.uint8)
    if rest := -flat.numel() % _BITS:
        flat = torch.cat([flat, flat.new_zeros(rest)])
    columns = flat.view(-1, _BITS).unbind(1)
    packed = columns[0].clone()
    for bit, column in enumerate(columns[1:], start=1):
        packed |= column << bit
    return packed


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """The first ``numel`` booleans that :func:`pack_bits` packed, as bool ``[numel]``."""
    shifts = torch.arange(_BITS, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> shifts) & 1).view(-1)[:numel].bool()


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes of ``bits`` bits each, plane by plane: :func:`pack_bits` of every lowest bit, then of every next one.

    Args:
        codes: uint8, any shape, each below 2^bits.
        bits: 1 to 8.

    Returns:
        uint8 ``[bits, ceil(numel / 8)]``.
    """
    return torch.stack([pack_bits((codes >> plane & 1).bool()) for plane in range(bits)])


def unpack_codes(packed: Tensor, numel: int) -> Tensor:
    """The first ``numel`` codes that :func:`pack_codes` packed, as uint8 ``[numel]``."""
    codes = torch.zeros(numel, dtype=torch.uint8, device=packed.device)
    for plane, row in enumerate(packed):
        codes |= unpack_bits(row, numel).to(torch.uint8) << plane
    return codes
