"""The peak: the most bytes alive at once in a whole training step, counted op by op, without a GPU's allocator.

:func:`~hf_memsave.measure_kept` counts what lies between forward and backward; what makes a step fit is the most that
is ever alive. A dispatch mode sees every storage that an op makes, in forward and in backward (PyTorch hands the mode
on to the threads of its engine), and a weak reference tells when that storage dies. Nothing is sampled.

Not seen: buffers that a kernel takes for itself and frees before it returns, tensors that no op makes (the states of
generators), rounding and fragmentation in an allocator. Under any dispatch mode PyTorch adds the gradients of a tensor
with several consumers out of place, where otherwise it adds in place if it can: at such a moment the count has one
gradient of that tensor more.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hf_memsave.tape.meter import StorageMode, storages


@dataclass(frozen=True)
class Peak:
    """What :func:`count_peak` found, in bytes above what was alive at the start."""

    peak: int  # the most that was alive at once
    end: int  # what is still alive after the step: gradients, if they were not there before, and whatever leaks
    timeline: tuple[tuple[str, int], ...]  # each op in turn, and the bytes alive when it returned


def count_peak(step: Callable[[], Any], unit: int = 1) -> Peak:
    """Run ``step`` once and count the most bytes that are alive at once in it.

    Every storage that an op in ``step`` makes counts once, on whatever device; of one from before, its growth.
    What ``step`` returns is dropped. Python's collector waits: what hangs in a reference cycle counts to the end.

    Args:
        step: Does one forward and backward, as in ``lambda: model(**batch).loss.backward()``.
        unit: What an allocator rounds the bytes of a storage up to.

    Returns:
        The peak, what is left at the end, and the bytes alive after each op.
    """
    count = Count(unit=unit)
    torch.clear_autocast_cache()  # a cast of a weight from before would not be counted
    try:
        with collector_off(), count.watching_resizes():
            with count:
                step()
            gc.collect()
            return Peak(count.peak, count.live, tuple(count.timeline))
    finally:
        count.made.clear()  # what is alive still has callbacks here


@dataclass
class _Entry:
    """A storage that counts: the reference that tells of its death, and its bytes, of which ``before`` do not count."""

    ref: weakref.ref[torch.UntypedStorage]
    nbytes: int
    before: int

    @property
    def counted(self) -> int:
        return max(0, self.nbytes - self.before)


class Count(StorageMode):
    """The bytes alive of all storages that ops make while the mode is on, and the most that they came to.

    Args:
        device: The type of device that counts; None for all but "meta".
        unit: What an allocator rounds the bytes of a storage up to.
    """

    def __init__(self, device: str | None = None, unit: int = 1) -> None:
        super().__init__()
        self.device, self.unit = device, unit
        self.made: dict[int, _Entry] = {}
        self.live = self.peak = 0
        self.timeline: list[tuple[str, int]] = []

    def storages(self, leaves: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
        """The storages on the device."""
        return storages(leaves, lambda kind: kind != "meta" if self.device is None else kind == self.device)

    def after(self, func: Any, args: Any, given: list[tuple[Any, int]], made: list[torch.UntypedStorage]) -> None:
        """Count what the op made, and by how much it made others larger or smaller."""
        is_constant = func is torch.ops.aten.lift_fresh.default  # torch.tensor(...): made just now, and not by an op
        for storage, before in given:
            self.see(storage, 0 if is_constant else before)
        for storage in made:
            self.see(storage)
        self.note(func, args)

    def note(self, func: Any, args: Any) -> None:
        """Called after each op."""
        self.timeline.append((str(func), self.live))

    def see(self, storage: torch.UntypedStorage, before: int = 0) -> None:
        """Count the bytes that ``storage`` has now; it had ``before`` of them before the op, none if it is new."""
        key, nbytes, before = storage._cdata, rounded(storage.nbytes(), self.unit), rounded(before, self.unit)
        entry = self.made.get(key)
        if entry is None:
            if nbytes == before:  # from before the step, or empty
                return
            # The address can serve another storage only after the reference's callback has run.
            entry = self.made[key] = _Entry(weakref.ref(storage, partial(self._died, key)), before, before)
        self.live -= entry.counted
        entry.nbytes = nbytes
        self.live += entry.counted
        self.peak = max(self.peak, self.live)

    def _died(self, key: int, _: Any) -> None:
        entry = self.made.pop(key, None)
        if entry is not None:
            self.live -= entry.counted

    @contextlib.contextmanager
    def watching_resizes(self) -> Iterator[None]:
        """``storage.resize_`` is no op, and no mode sees it: stand in for it."""
        home: Any = torch.UntypedStorage
        stock, own = home.resize_, vars(home).get("resize_")

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            before = storage.nbytes()
            result = stock(storage, size)
            self.see(storage, before)
            return result

        home.resize_ = resize_
        try:
            yield
        finally:
            if own is None:
                del home.resize_
            else:
                home.resize_ = own


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Keep Python's collector off: when it comes depends on everything that the process did before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def rounded(nbytes: int, unit: int) -> int:
    """``nbytes``, rounded up to a multiple of ``unit``."""
    return -(-nbytes // unit) * unit
