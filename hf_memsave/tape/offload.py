"""Offload: what a tape still has to keep goes to main memory, and comes back in backward, before it is asked for.

A storage is copied once, however many views of it are kept; :mod:`~hf_memsave.tape.transfers` says when. On CUDA it
goes into pinned memory while the model computes, on CPU it is a plain copy. Exact: a copy there and back. Source:
``torch.autograd.graph.save_on_cpu``; Rajbhandari et al. (2021), arXiv:2104.07857.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hf_memsave.device import STAND_IN, free_main_memory, has_streams
from hf_memsave.errors import MemSaveError
from hf_memsave.tape.content import BUFFER, COUNTED, MARK, linked, written
from hf_memsave.tape.lanes import AtOnce, Streams
from hf_memsave.tape.private import neg_view
from hf_memsave.tape.tensors import is_plain
from hf_memsave.tape.transfers import Parcel, Transfers
from hf_memsave.tape.wrappers import taken_apart

#: Bytes below which a storage stays where it is.
SMALLEST_NBYTES = 2**16
#: The part that may be taken of the main memory that was free at first: later PyTorch holds what it has pinned.
SHARE = 0.8
_free_at_first = cache(free_main_memory)
#: On a storage: its copy in main memory, and of what version.
_COPY = "_memsave_copy"


class Offload(saved_tensors_hooks):
    """``with Offload(): loss = model(x)``: saved tensors lie in main memory, but for parameters and buffers."""

    def __init__(self) -> None:
        super().__init__(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Any:
        # Without its graph; a parameter of ZeRO-3 as the object that the engine fills again.
        itself = tensor if tensor.is_leaf else tensor.detach(), tensor._version
        if tensor.layout is not torch.strided or _is_there_anyway(tensor):
            return itself
        if not is_plain(tensor):
            apart = taken_apart(tensor)
            return itself if apart is None else ([self._pack(part) for part in apart[0]], apart[1])
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALLEST_NBYTES:
            return itself
        if tensor._version and tensor.numel() * tensor.itemsize < storage.nbytes():
            # A chunk of an LSTM's or GRU's gates has a version of its own: a copy of all of them tells nothing of it.
            tensor = tensor.detach().clone()
            storage = tensor.untyped_storage()
        away, version = getattr(storage, _COPY, (lambda: None, None))
        copy: Away | None = away()
        known = linked(storage)
        if copy is None or version != tensor._version or (known is not None and known.is_unversioned):
            # Versions tell nothing of what may be written to through `.data`, or filled and freed by an engine.
            copy = Away(tensor, is_at_once=known is not None and (known.is_unversioned or known.owner is None))
            setattr(storage, _COPY, (weakref.ref(copy), tensor._version))
            if (entry := getattr(storage, COUNTED, None)) is not None:
                entry.copies.add(copy)
        view = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        return copy, *view, tensor.is_conj(), tensor.is_neg()


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed[0], Tensor):
        tensor, version = packed
        if tensor._version != version:
            raise written(tensor, version)
        return tensor
    if isinstance(packed[0], list):
        parts, wrap = packed
        wrapped: Tensor = wrap(map(_unpack, parts))
        return wrapped.detach()
    copy, dtype, shape, stride, offset, is_conj, is_neg = packed
    there = copy.back()
    whole = there[: len(there) // dtype.itemsize * dtype.itemsize].view(dtype)  # a view, so that it holds the bytes
    found = whole.as_strided(shape, stride, offset)
    found = neg_view(found) if is_neg else found
    return found.conj() if is_conj else found


def before_write(tensor: Tensor) -> None:
    """Called before ``tensor``, plain and strided, is written to: a copy on another stream may still read it."""
    away, _ = getattr(tensor.untyped_storage(), _COPY, (lambda: None, None))
    if (copy := away()) is not None:
        copy.before_write()


def _is_there_anyway(tensor: Tensor) -> bool:
    base = tensor if tensor._base is None else tensor._base
    is_buffer = is_plain(tensor) and getattr(tensor.untyped_storage(), MARK, None) is BUFFER
    return is_buffer or isinstance(base, nn.Parameter)


class Away:
    """The bytes of one storage, in main memory or on their way.

    Attributes:
        total: Bytes that all that are alive take of main memory.
        moved: Bytes of all that there ever were.
    """

    total = moved = 0

    def __init__(self, tensor: Tensor, is_at_once: bool = False) -> None:
        self._transfers = transfers = transfers_of(tensor.device)
        there = _bytes(tensor)
        watched = () if transfers.lane.is_at_once else ((tensor.detach(), tensor._version), (there, there._version))
        self._parcel = Parcel(there, len(there), partial(_written_since, watched))
        Away.moved += len(there)
        weakref.finalize(self, transfers.let_go, self._parcel).atexit = False
        transfers.pack(self._parcel, is_at_once)

    @property
    def host(self) -> Tensor | None:
        """The copy, if there is one already."""
        return self._parcel.host

    def before_write(self) -> None:
        """What is done to the storage from now on comes after its copy."""
        self._transfers.secure(self._parcel)

    def back(self) -> Tensor:
        """The bytes where they were."""
        there: Tensor = self._transfers.back(self._parcel)
        return there


def _written_since(watched: Iterable[tuple[Tensor, int]]) -> Exception | None:
    return next((written(tensor, version) for tensor, version in watched if tensor._version != version), None)


_transfers: dict[torch.device, Transfers] = {}


def transfers_of(device: torch.device) -> Transfers:
    """What leaves ``device`` and comes back, for all threads."""
    if (found := _transfers.get(device)) is None:
        lane = Streams if has_streams(device) else AtOnce
        found = _transfers.setdefault(device, Transfers(lane(device, main_memory)))
    return found


def _bytes(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    if tensor.device.type == STAND_IN:  # where PyTorch's cache of fake calls would hold the storage given to set_
        return tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0).view(torch.uint8)
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _taken(nbytes: int, is_pinned: bool) -> int:
    """What so many bytes take: PyTorch's allocator of pinned memory rounds each block up to a power of two."""
    return 1 << (nbytes - 1).bit_length() if is_pinned and nbytes else nbytes


def _give_back(nbytes: int) -> None:
    Away.total -= nbytes


def main_memory(nbytes: int, device: torch.device) -> Tensor:
    """Room for ``nbytes`` of ``device``: on CUDA pinned, so that copies need no processor."""
    is_pinned = has_streams(device)
    taken, room = _taken(nbytes, is_pinned), SHARE * _free_at_first()
    if Away.total + taken > room and device.type != STAND_IN:  # on which nothing has bytes
        room = max(room, SHARE * (Away.total + free_main_memory()))
    if Away.total + taken > room and device.type != STAND_IN:
        raise MemSaveError(
            f"offload=True: expected room for {(Away.total + taken) / 2**30:.1f} GiB in main memory, got "
            f"{room / 2**30:.1f} GiB ({SHARE:.0%} of what was free, or of this process's limit). Use a smaller batch, "
            "or checkpoint='gate', or no offload."
        )
    host = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
    Away.total += taken
    weakref.finalize(host, _give_back, taken)
    return host
