"""Codecs: a node that gives a tensor back from fewer bytes. Here: booleans in one bit an element, codes in a few.

PyTorch keeps a byte for each boolean, such as the masks of ``torch.where`` and of CUDA's dropout.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_memsave.tape.handles import Handle, Node, Ticket
from hf_memsave.tape.quantize import decode, encode
from hf_memsave.tape.record import COUNTED, Record
from hf_memsave.tape.tensors import is_dense

#: Booleans below which bits are not worth their trouble.
SMALLEST = 4096
#: On the storage of booleans, a function that gives the forward in which they were coded; or None, once that is over.
CODED_IN = "_memsave_coded_in"

_BITS = 8


def pack_bits(flags: Tensor) -> Tensor:
    """Eight booleans a byte, lowest bit first, as uint8 ``[ceil(numel / 8)]``; what is not zero is true."""
    flat = (flags.reshape(-1).view(torch.uint8) != 0).view(torch.uint8)
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


class Coders(NamedTuple):
    """What packs and codes: functions of these four names and arguments, whose results each other's can read."""

    pack_bits: Callable[[Tensor], Tensor] = pack_bits
    unpack_bits: Callable[..., Tensor] = unpack_bits
    encode: Callable[..., tuple[Tensor, Tensor]] = encode
    decode: Callable[..., Tensor] = decode


#: PyTorch's own functions.
CODERS = Coders()


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes below 2^bits as ``[bits, *]``: :func:`pack_bits` of every lowest bit, then of every next one."""
    return torch.stack([pack_bits((codes >> plane & 1).bool()) for plane in range(bits)])


def unpack_codes(packed: Tensor, numel: int) -> Tensor:
    """The first ``numel`` codes that :func:`pack_codes` packed, as uint8 ``[numel]``."""
    codes = torch.zeros(numel, dtype=torch.uint8, device=packed.device)
    for plane, row in enumerate(packed):
        codes |= unpack_bits(row, numel).to(torch.uint8) << plane
    return codes


def coded(
    tape: Any,
    record: Record,
    storage: Any,
    tensor: Tensor,
    decode: Callable[..., Tensor],
    codes: tuple[Tensor, ...],
    is_lossy: bool,
) -> Node:
    """Gives ``tensor``, dense, back as ``decode(*codes)``; and all views of ``storage``, where it is all that there is.

    Returns:
        For tickets that go on the tape.
    """
    nbytes = tensor.numel() * tensor.itemsize
    node = Node(decode, tensor.stride(), nbytes, tape.block, tape.lock)
    node.args, node.is_lossy = [tape.keep(code) for code in codes], is_lossy
    node.first = sys.maxsize  # it builds on no block, so it is too far from none
    if nbytes == storage.nbytes():
        record.forget()
        record.node, record.version = weakref.ref(node), tensor._version
        record.dtype, record.stride = tensor.dtype, tensor.stride()
    tape.note_small(node, sum(code.nbytes for code in codes), "code", is_exact=not is_lossy)
    if is_lossy and tape.in_place != "inexact" and (entry := getattr(storage, COUNTED, None)) is not None:
        entry.cost = entry.nbytes
    return node


class Whole:
    """The geometry of a dense tensor in a storage of its own."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.stride = tensor.shape, tensor.stride

    def storage_offset(self) -> int:
        """It starts where its storage does."""
        return 0


def as_bits(tape: Any, record: Record, storage: Any, tensor: Tensor) -> Handle | None:
    """One bit for each byte of the storage of a boolean tensor, for all its views; None where that saves nothing."""
    if not SMALLEST <= storage.nbytes() <= 2 * tensor.numel() or not is_dense(tensor) or _lives_on(tape, storage):
        return None
    setattr(storage, CODED_IN, weakref.ref(tape.root))
    flags = tensor.detach().as_strided((storage.nbytes(),), (1,), 0)
    decode = partial(tape.coders.unpack_bits, numel=flags.numel())
    node = coded(tape, record, storage, flags, decode, (tape.coders.pack_bits(flags),), is_lossy=False)
    return Ticket(node, tensor)


def _lives_on(tape: Any, storage: Any) -> bool:
    """Whether the booleans are held beyond a forward: bits of them would be kept in addition."""
    coded_in = getattr(storage, CODED_IN, None)
    return coded_in is not None and coded_in() is not tape.root


def leave_alone(held: Any, depth: int = 4) -> None:
    """Never code the booleans in ``held``, nor in containers in it: the caller may hold them until backward."""
    if isinstance(held, Tensor):
        if held.dtype is torch.bool:
            with contextlib.suppress(NotImplementedError, RuntimeError):  # it is sparse, or of a transform
                setattr(held.untyped_storage(), CODED_IN, _no_forward)
    elif depth and isinstance(held, (list, tuple, Mapping)):
        for inner in held.values() if isinstance(held, Mapping) else held:
            leave_alone(inner, depth - 1)


def _no_forward() -> None:
    return None
