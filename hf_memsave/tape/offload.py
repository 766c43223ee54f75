"""Offload: what a tape still has to keep goes to main memory, and comes back in backward, before it is asked for.

A storage is copied once, however many views of it are kept. On CUDA it goes into pinned memory on a stream of its own,
while the model computes; in backward, whenever one is asked for, those kept before it are on their way. On CPU it is a
plain copy. Exact: a copy there and back. Source: ``torch.autograd.graph.save_on_cpu``; Rajbhandari et al. (2021),
arXiv:2104.07857.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hf_memsave.device import STAND_IN, current_stream, has_streams
from hf_memsave.errors import MemSaveError
from hf_memsave.tape.content import BUFFER, COUNTED, MARK, linked, written
from hf_memsave.tape.private import neg_view
from hf_memsave.tape.tensors import is_plain
from hf_memsave.tape.wrappers import taken_apart

#: Bytes below which a storage stays where it is.
SMALLEST_NBYTES = 2**16
#: How many are on their way back beside the one that is asked for.
AHEAD = 2
#: The part of main memory that may be taken.
SHARE = 0.8
#: On a storage: its copy in main memory, and of what version.
_COPY = "_memsave_copy"


class Offload(saved_tensors_hooks):
    """``with Offload(): loss = model(x)``: saved tensors lie in main memory, but for parameters and buffers."""

    def __init__(self) -> None:
        super().__init__(self._pack, _unpack)
        self._last: weakref.ref[Away] | None = None

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for device, stream in list(_streams.items()):  # what writes from now on, no tape sees
            current_stream(device).wait_stream(stream)

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
            copy = Away(tensor, self._last)
            self._last = weakref.ref(copy)
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
    """The bytes of one storage, in main memory.

    Attributes:
        total: Bytes that all that are alive take of main memory.
        moved: Bytes of all that there ever were.
    """

    total = moved = 0

    def __init__(self, tensor: Tensor, before: weakref.ref[Away] | None) -> None:
        whole = _bytes(tensor)
        nbytes = len(whole)
        taken = _taken(nbytes, tensor.is_cuda)
        if tensor.device.type != STAND_IN:  # on which nothing has bytes
            _refuse_too_much(taken)
        self.device, self._before = tensor.device, before
        self._there: Callable[[], Tensor | None] = lambda: None
        self._version = 0
        self._on_its_way: tuple[Tensor, Any] | None = None
        self._arrival = self._copied = None  # events
        self.host = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=tensor.is_cuda)
        Away.total += taken
        Away.moved += nbytes
        weakref.finalize(self, _give_back, taken)
        if tensor.is_cuda:
            stream = _stream(self.device)
            stream.wait_stream(current_stream(self.device))
            with torch.cuda.stream(stream):
                self.host.copy_(whole, non_blocking=True)
                self._copied = stream.record_event()
            whole.record_stream(stream)
        else:
            self.host.copy_(whole)

    def before_write(self) -> None:
        """What is done to the storage from now on comes after its copy."""
        if self._copied is not None:
            current_stream(self.device).wait_event(self._copied)

    def back(self) -> Tensor:
        """The bytes where they were."""
        there = self._there()
        if there is None or there._version != self._version:  # who took it may have written to it
            there, self._arrival = self._send_for()
            self._on_its_way = None
            self._there, self._version = weakref.ref(there), there._version
        if has_streams(self.device):  # each asker may be on a stream of its own
            now = current_stream(self.device)
            now.wait_event(self._arrival)
            there.record_stream(now)
            one: Away | None = self
            for _ in range(AHEAD):
                one = None if one is None or one._before is None else one._before()
                if one is not None and one._there() is None:
                    one._send_for()
        return there

    def _send_for(self) -> tuple[Tensor, Any]:
        if not has_streams(self.device):
            return self.host.to(self.device, copy=True), None
        if self._on_its_way is None:
            stream = _stream(self.device)
            with torch.cuda.stream(stream):
                self._on_its_way = self.host.to(self.device, non_blocking=True), stream.record_event()
        return self._on_its_way


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


_streams: dict[torch.device, Any] = {}


def _stream(device: torch.device) -> Any:
    return _streams.get(device) or _streams.setdefault(device, torch.cuda.Stream(device))  # one for all threads


def _refuse_too_much(nbytes: int) -> None:
    main_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if Away.total + nbytes > SHARE * main_memory:
        raise MemSaveError(
            f"offload=True: expected room for {(Away.total + nbytes) / 2**30:.1f} GiB in main memory, got "
            f"{SHARE * main_memory / 2**30:.1f} GiB ({SHARE:.0%} of what this machine has). Use a smaller batch, or "
            "checkpoint='gate', or no offload."
        )
