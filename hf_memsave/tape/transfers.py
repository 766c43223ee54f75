"""When a storage leaves a device, and when it comes back: copies that keep up with the model, or slow it by a part.

A parcel is one storage that a forward packed. It waits on the device, leaves, is gone, and comes back. All bounds are
in bytes, as parts of what is packed and not let go of yet, so that neither layers nor steps have to be known:

1. Parcels leave in the order of packing, :data:`AHEAD` of all bytes at a time. The others wait, and can still stay.
2. :data:`HELD` of all bytes may be on the device. Beyond that the model waits for the oldest copy, so that a bus slower
   than the model slows it, and does not fill the device.
3. The host is ahead of the device by :data:`AHEAD`: memory is given away in the host's order, not in the device's.
4. In backward nothing leaves. What is on the device is used as it is, so the last layers stay. Of what is gone, enough
   is on its way back to have as large a part on the device as when backward began; at least the next parcel.
5. Before memory that a copy reads or writes is let go of, its stream has waited for that copy, or the host has seen it
   done: nothing waits for the allocator (``record_stream``), but where another stream reads it.
6. A parcel that was written to before its copy was known to be done is an error, as in stock, and no wrong number.

What a device does, a lane knows (:mod:`~hf_memsave.tape.lanes`); ``tests/support/lanes.py`` has one with a clock.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from hf_memsave.tape.lanes import AtOnce

#: The part of what is packed that may be on the device, where the bus is slower than the model.
HELD = 0.4
#: The part of it that leaves, or comes back, at a time: at least one parcel.
AHEAD = 1 / 32
#: Bytes below which neither bound counts.
LEAST = 2**27


class Parcel:
    """One storage. ``error`` gives what to raise if it was written to since it was packed, else None."""

    def __init__(self, there: Any, nbytes: int, error: Callable[[], Exception | None]) -> None:
        self.there, self.nbytes, self.error = there, nbytes, error
        self.number = -1
        self.home: Any = None  # the stream of its memory
        self.made: Any = None  # the event after which it can be read
        self.left: Any = None  # the event after which its copy can be read; None while it waits
        self.host: Any = None
        self.coming: Any = None  # on its way back: what, the event when it is there, the stream of its memory
        self.lent: tuple[Callable[[], Any], int, Any, Any] = _nothing, 0, None, None  # what came, as long as it is read
        self.lost: Exception | None = None  # it was written to before its copy was known to be done


class Transfers:
    """All parcels of one device, for all forwards and threads."""

    def __init__(self, lane: AtOnce) -> None:
        self.lane = lane
        self.total = self.held = 0  # bytes that are packed; of them those on the device, or on their way back
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._all: dict[int, Parcel] = {}
        self._waiting, self._leaving = deque[Parcel](), deque[Parcel]()
        self._turn: tuple[int, float] | None = None  # as backward began: what may come, and the part that was there
        self._through = deque[Parcel]()  # to be forgotten by who has the lock

    @property
    def ahead(self) -> int:
        """Bytes that may leave, or come back, at a time."""
        return max(LEAST, int(AHEAD * self.total))

    def pack(self, parcel: Parcel, is_at_once: bool) -> None:
        """A forward has made ``parcel``; ``is_at_once``: it may be written to unseen, so its copy cannot wait."""
        with self._alone():
            parcel.number, parcel.home, parcel.made = next(self._numbers), self.lane.now(), self.lane.mark()
            self._turn = None
            self._all[parcel.number] = parcel
            self.total += parcel.nbytes
            self.held += parcel.nbytes
            if is_at_once or self.lane.is_at_once:
                return self._secure(parcel)
            self._waiting.append(parcel)
            self._have_host_wait()
            self._go_on()
            while self.held > max(LEAST, HELD * self.total):
                queue = self._leaving or self._waiting
                if not queue or queue[0] is parcel:
                    return
                self._secure(queue[0])
                queue.popleft()

    def secure(self, parcel: Parcel) -> None:
        """What its stream does to it from now on comes after its copy."""
        with self._alone():
            self._secure(parcel)

    def back(self, parcel: Parcel) -> Any:
        """The bytes where they were, for the caller's stream; what was packed before them follows."""
        with self._alone():
            if parcel.there is not None:
                parcel.lost = parcel.lost or parcel.error()
            if parcel.lost is not None:
                raise copy.copy(parcel.lost)  # which will hold the graph by its traceback
            there, came, home = parcel.there, parcel.made, parcel.home
            if there is None:
                there, came, home = self._brought(parcel)
            self.lane.lend(there, came, home)
            if not self.lane.is_at_once:
                self._fetch_before(parcel)
            return there

    def let_go(self, parcel: Parcel) -> None:
        """Backward is through with it, or there will be none. For finalizers: this waits for no other thread."""
        self._through.append(parcel)
        self._sweep()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            self._sweep()

    def _sweep(self) -> None:
        while self._through and self._lock.acquire(blocking=False):  # else who has it sweeps afterwards
            try:
                while self._through:
                    self._forget(self._through.popleft())
            finally:
                self._lock.release()

    def _forget(self, parcel: Parcel) -> None:
        if self._all.pop(parcel.number, None) is None:
            return
        self.total -= parcel.nbytes
        if parcel.there is not None and parcel.left is not None:
            self.lane.wait(parcel.left, parcel.home)
        self._gone(parcel)
        if parcel.coming is not None:
            self.lane.wait(*parcel.coming[1:])
            self.held -= parcel.nbytes
        parcel.coming = parcel.host = None
        while self._waiting and self._waiting[-1].there is None:
            self._waiting.pop()

    def _have_host_wait(self) -> None:
        room = self.ahead
        for parcel in itertools.chain(reversed(self._waiting), reversed(self._leaving)):
            room -= 0 if parcel.there is None else parcel.nbytes
            if room <= 0:
                return parcel.made.synchronize()

    def _go_on(self) -> None:
        """Copies that are done let go of the device's memory, and others begin."""
        while self._leaving and (self._leaving[0].there is None or self._leaving[0].left.query()):
            self._gone(self._leaving.popleft())
        room = self.ahead - sum(parcel.nbytes for parcel in self._leaving if parcel.there is not None)
        while self._waiting and (not self._leaving or room >= self._waiting[0].nbytes):
            parcel = self._waiting[0]
            if parcel.there is not None:
                self._send(parcel)
                self._leaving.append(parcel)
                room -= parcel.nbytes
            self._waiting.popleft()

    def _secure(self, parcel: Parcel) -> None:
        if parcel.there is not None:
            self._send(parcel)
            self.lane.wait(parcel.left, parcel.home)
            self._gone(parcel)

    def _send(self, parcel: Parcel) -> None:
        if parcel.left is None:
            parcel.host, parcel.left = self.lane.send(parcel.there, parcel.made)

    def _gone(self, parcel: Parcel) -> None:
        """Its copy is done, or what its stream does from now on comes after that."""
        if parcel.there is not None:
            parcel.lost = parcel.lost or parcel.error()
            parcel.there, parcel.error = None, _nothing
            self.held -= parcel.nbytes

    def _brought(self, parcel: Parcel) -> tuple[Any, Any, Any]:
        get, version, came, home = parcel.lent
        there = get()
        if there is None or there._version != version:  # who was given it may have written to it
            self._fetch(parcel)
            there, came, home = parcel.coming
            self.held -= parcel.nbytes
            parcel.coming, parcel.lent = None, (weakref.ref(there), there._version, came, home)
        return there, came, home

    def _fetch(self, parcel: Parcel) -> None:
        if parcel.coming is None:
            parcel.coming = *self.lane.fetch(parcel.host, parcel.left), self.lane.now()
            self.held += parcel.nbytes

    def _fetch_before(self, asked: Parcel) -> None:
        self._turn = least, part = self._turn or (self.ahead, self.held / self.total)
        room, is_next = max(least, part * self.total) - asked.nbytes, True
        for number in itertools.dropwhile(lambda n: n >= asked.number, reversed(list(self._all))):
            parcel = self._all[number]
            room -= parcel.nbytes
            if room < 0 and not is_next:
                return
            if parcel.there is None and parcel.lost is None and parcel.lent[0]() is None:
                self._fetch(parcel)
            is_next = False


def _nothing() -> None:
    return None
