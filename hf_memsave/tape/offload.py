"""Offload: what a tape has to keep goes to main memory, and comes back in backward, before it is asked for.

A storage is copied once, however many views of it are kept: on CUDA into pinned memory, while the model computes.

1. It leaves as it is packed, and its memory is freed once the copy is known to be done. Beyond :data:`IN_FLIGHT` bytes
   the host waits for the oldest copy: a slow bus slows the model, and does not fill the device.
2. Backward uses what is still there. It fetches the rest ahead of time, the last packed first, as many bytes at most.
3. Memory that a copy reads or writes is freed when the host has seen it done, or when the memory's own stream waits for
   it: nothing waits for the allocator (``record_stream``), but where another stream reads what came back.
4. A write to a storage before its copy was known to be done raises an error in backward, as in stock.

Exact: a copy there and back. Source: ``torch.autograd.graph.save_on_cpu``; Rajbhandari et al. (2021), arXiv:2104.07857.
"""

from __future__ import annotations

import copy
import itertools
import sys
import threading
import weakref
from collections import deque
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hf_memsave.device import STAND_IN, current_stream, free_main_memory, has_streams
from hf_memsave.errors import MemSaveError
from hf_memsave.tape.content import BUFFER, COUNTED, MARK, is_parameter, linked
from hf_memsave.tape.handles import written
from hf_memsave.tape.private import neg_view
from hf_memsave.tape.tensors import is_plain
from hf_memsave.tape.wrappers import taken_apart

#: Bytes below which a storage stays where it is.
SMALLEST_NBYTES = 2**16
#: Bytes that may be on their way, out or back; twice the largest storage, if that is more.
IN_FLIGHT = 2**29
#: How many storages, packed before the one that backward asks for, may be fetched ahead.
AHEAD = 64
#: The part that may be taken of the main memory that was free at first: later, PyTorch keeps what it has pinned.
SHARE = 0.8
_free_at_first = cache(free_main_memory)
#: Attribute of a storage: its copy in main memory, weakly, and the version that was copied.
_COPY = "_memsave_copy"


class Offload(saved_tensors_hooks):
    """``with Offload(): loss = model(x)`` keeps saved tensors, but for parameters and buffers, in main memory."""

    def __init__(self) -> None:
        super().__init__(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Any:
        # Without its graph; a parameter of ZeRO-3 as the object that the engine fills again.
        itself = tensor if tensor.is_leaf else tensor.detach(), tensor._version
        if tensor.layout is not torch.strided or is_parameter(tensor):
            return itself
        if not is_plain(tensor):
            apart = taken_apart(tensor)
            return itself if apart is None else ([self._pack(part) for part in apart[0]], apart[1])
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALLEST_NBYTES or getattr(storage, MARK, None) is BUFFER:
            return itself
        if tensor._version and tensor.numel() * tensor.itemsize < storage.nbytes():
            # A chunk of an LSTM's or GRU's gates has a version of its own: a copy of all of them tells nothing of it.
            tensor = tensor.detach().clone()
            storage = tensor.untyped_storage()
        away, version = getattr(storage, _COPY, (lambda: None, None))
        copy: Away | None = away()
        known = linked(storage)
        if copy is None or version != tensor._version or (known is not None and known.is_unversioned):
            copy = Away(tensor)
            if known is not None and (known.is_unversioned or known.owner is None):
                # Versions tell nothing of what may be written to through `.data`, or filled and freed by an engine.
                copy.before_write()
            setattr(storage, _COPY, (weakref.ref(copy), tensor._version))
            if (entry := getattr(storage, COUNTED, None)) is not None:
                entry.copies.append(weakref.ref(copy))
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
    whole = there[: len(there) // dtype.itemsize * dtype.itemsize].view(dtype)  # a view, so that it keeps the bytes
    found = whole.as_strided(shape, stride, offset)
    found = neg_view(found) if is_neg else found
    return found.conj() if is_conj else found


def before_write(tensor: Tensor) -> None:
    """Have a coming write to ``tensor``, plain and strided, wait for the copy that another stream may still make."""
    away, _ = getattr(tensor.untyped_storage(), _COPY, (lambda: None, None))
    if (copy := away()) is not None:
        copy.before_write()


class _InOrder:
    """The stream and the events of a device that runs each call at once, such as a CPU."""

    def _done(self, *_: Any) -> _InOrder:
        return self

    wait_event = wait_stream = record_event = query = synchronize = _done


class Queue:
    """The storages that leave one device and come back, of all forwards and threads."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.in_order, self.lock = device, _InOrder(), threading.Lock()
        self.out, self.into = (torch.cuda.Stream(device) if has_streams(device) else self.in_order for _ in range(2))
        self.bound = self.leaving = 0  # bytes that may be on their way; that were sent, and not seen to arrive
        self.moved = 0  # bytes of all that was ever sent
        self.sent = deque[tuple[Any, int, weakref.ref[Away]]]()
        self.packed = weakref.WeakKeyDictionary[Away, None]()  # in this order
        self.coming = weakref.WeakSet[Away]()  # fetched, and not asked for yet

    def now(self) -> Any:
        """Return the stream that the caller works on; in backward, autograd has set it."""
        return current_stream(self.device) or self.in_order

    def copy(self, source: Tensor, target: Tensor, stream: Any) -> Any:
        """Copy ``source`` to ``target`` on ``stream``; return the event of its end: a host that waits for it sleeps."""
        if stream is self.in_order:
            target.copy_(source)
            return stream
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event(torch.cuda.Event(blocking=True))

    def add(self, away: Away) -> None:
        """Queue ``away``, which was sent, and free the device memory of storages that have arrived."""
        self.bound = max(self.bound, IN_FLIGHT, 2 * away.nbytes)
        self.leaving += away.nbytes
        self.packed[away] = None
        self.sent.append((away.left, away.nbytes, weakref.ref(away)))
        while self.sent and (self.leaving > self.bound or self.sent[0][0].query()):
            left, nbytes, ref = self.sent.popleft()
            left.synchronize()
            self.leaving -= nbytes
            if (oldest := ref()) is not None:
                oldest.drop()

    def fetch_before(self, asked: Away) -> None:
        """Fetch storages packed before ``asked``, as far as there is room; at least one, if none is on its way."""
        room = self.bound - sum(away.nbytes for away in self.coming)
        order = itertools.dropwhile(lambda ref: ref() is not asked, reversed(self.packed.keyrefs()))
        for away in (ref() for ref in itertools.islice(order, 1, 1 + AHEAD)):
            if away is not None and away.there is not None:
                room -= away.nbytes
            elif away is not None and away.returned[0]() is None:
                if self.coming and away.nbytes > room:
                    return
                away.fetch()
                room -= away.nbytes


#: The queue of a device.
queue_of = cache(Queue)


class Away:
    """The bytes of one storage: on the device (``there``), in main memory (``host``), or both."""

    total = 0  # bytes of main memory that all live instances take
    there: Any = None  # until the copy is known to be done, or the stream of its memory waits for it
    coming: Any = None  # what was fetched, until it is asked for
    lost: Exception | None = None  # it was written to before the copy was known to be done

    def __init__(self, tensor: Tensor) -> None:
        there, self.queue = _bytes(tensor), queue_of(tensor.device)
        self.nbytes, home = len(there), self.queue.now()
        self.watched: Any = (tensor.detach(), tensor._version), (there, there._version)
        # What is given back, weakly; its version; the event after which it can be read; the stream of its memory.
        self.returned: Any = weakref.ref(there), there._version, home.record_event(), home
        with self.queue.lock:
            self.host = main_memory(self.nbytes, tensor.device)
            self.queue.out.wait_event(self.returned[2])
            self.left = self.queue.copy(there, self.host, self.queue.out)  # the event after which `host` can be read
            self.there = there
            self.queue.moved += self.nbytes
            self.queue.add(self)

    def before_write(self) -> None:
        """Have the caller's stream, and the memory's own, wait for the copy before they write to the storage."""
        with self.queue.lock:
            for stream in (self.queue.now(), self.returned[3]):
                stream.wait_event(self.left)
            self.drop()

    def drop(self) -> None:
        """Forget the memory on the device, which others may write to from now on."""
        self.check()
        if self.there is not None:
            self.there, self.watched, self.returned = None, (), (lambda: None, *self.returned[1:])

    def check(self) -> Exception | None:
        """Return the error to raise if the storage was written to before :meth:`drop`; else None."""
        writes = (written(tensor, version) for tensor, version in self.watched if tensor._version != version)
        self.lost = self.lost or next(writes, None)
        return self.lost

    def back(self) -> Any:
        """Return the bytes on the device, for the caller's stream, and fetch storages that were packed before."""
        with self.queue.lock:
            if (lost := self.check()) is not None:
                raise copy.copy(lost)  # whose traceback will keep the graph alive
            there = self.returned[0]()
            if there is None or there._version != self.returned[1]:  # who was given it may have written to it
                there = self.fetch()
            self.coming = None
            self.queue.coming.discard(self)
            now, (_, _, event, home) = self.queue.now(), self.returned
            now.wait_event(event)
            if now != home:
                there.record_stream(now)
            if self.queue.into is not self.queue.in_order:
                self.queue.fetch_before(self)
            return there

    def fetch(self) -> Tensor:
        """Copy the bytes back to the device, into memory that the caller's stream may have used until now."""
        queue, home = self.queue, self.queue.now()
        there = torch.empty(self.nbytes, dtype=torch.uint8, device=queue.device)
        queue.into.wait_event(self.left)
        queue.into.wait_stream(home)
        event = queue.copy(self.host, there, queue.into)
        self.coming, self.returned = there, (weakref.ref(there), there._version, event, home)
        queue.coming.add(self)
        return there

    def __del__(self) -> None:
        """Have the memory's stream wait for the copy under way: runs in any thread at any time, so without the lock."""
        if (self.there is not None or self.coming is not None) and not sys.is_finalizing():
            self.returned[3].wait_event(self.returned[2] if self.there is None else self.left)


def _bytes(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    if tensor.device.type == STAND_IN:  # where PyTorch's cache of fake calls would keep the storage given to set_
        return tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0).view(torch.uint8)
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _taken(nbytes: int, is_pinned: bool) -> int:
    """Return what ``nbytes`` take: PyTorch's allocator of pinned memory rounds each block up to a power of two."""
    return 1 << (nbytes - 1).bit_length() if is_pinned and nbytes else nbytes


def _give_back(nbytes: int) -> None:
    Away.total -= nbytes


def main_memory(nbytes: int, device: torch.device) -> Tensor:
    """Allocate main memory for ``nbytes`` of ``device``: for CUDA pinned, so that copies need no processor."""
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
