"""The peak: the most bytes alive at once in a whole training step, counted op by op, without a GPU's allocator.

:func:`~hf_memsave.measure_kept` counts what lies between forward and backward; what makes a step fit or not is the most
that is ever alive, which may be anywhere in it. A dispatch mode sees every storage that an op makes, in forward and in
backward (PyTorch hands the mode on to the threads of its engine), and a weak reference tells when that storage dies.
Nothing is sampled: the same step gives the same count on every machine with the same kernels.

Not seen: buffers that a kernel takes for itself and frees before it returns, tensors that no op makes (the states of
generators), rounding and fragmentation in an allocator. One thing is seen that a step by itself does not do: under any
dispatch mode PyTorch adds the gradients of a tensor with several consumers out of place, where otherwise it adds in
place if it can. At such a moment the count has one gradient of that tensor more.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_memsave.measure.private import quick_device
from hf_memsave.tape.wrappers import parts_of


@dataclass(frozen=True)
class Peak:
    """What :func:`count_peak` found, in bytes above what was alive at the start.

    Attributes:
        peak: The most that was alive at once.
        end: What is still alive after the step: gradients, if they were not there before, and whatever leaks.
        timeline: Each op in turn, and the bytes alive when it returned.
    """

    peak: int
    end: int
    timeline: tuple[tuple[str, int], ...]


def count_peak(step: Callable[[], Any], unit: int = 1) -> Peak:
    """Run ``step`` once and count the most bytes that are alive at once in it.

    Counted is every storage that an op in ``step`` makes, on whatever device, once, however many views it has. One that
    was there before does not count, and is not subtracted when it shrinks or dies; if it grows, its growth counts. What
    ``step`` returns is dropped. Python's collector waits until the step is over: what hangs in a reference cycle counts
    as long as it does.

    Args:
        step: Does one forward and backward, as in ``lambda: model(**batch).loss.backward()``; whether gradients are
            there already, as they are when they are accumulated, is up to the caller.
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
    before: int = 0

    @property
    def counted(self) -> int:
        return max(0, self.nbytes - self.before)


class Count(TorchDispatchMode):
    """The bytes alive of all storages that ops make while the mode is on, and the most that they came to.

    Args:
        device: The type of device that counts; None for all.
        unit: What an allocator rounds the bytes of a storage up to.
    """

    def __init__(self, device: str | None = None, unit: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.unit = device, unit
        self.made: dict[int, _Entry] = {}
        self.live = self.peak = 0
        self.timeline: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # a question that autograd asks fake tensors often
            return quick_device(args[0])
        given = [(storage, storage.nbytes()) for storage in self._storages((args, kwargs))]
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(...): made just now, and not by an op
            given = []
        for storage, before in given:
            self.see(storage, before)
        known = {storage._cdata for storage, _ in given}
        for storage in self._storages(output):
            if storage._cdata not in known:
                self.see(storage)
        self.note(func, args)
        return output

    def note(self, func: Any, args: Any) -> None:
        """Called after each op."""
        self.timeline.append((str(func), self.live))

    def _storages(self, tree: Any) -> Iterator[torch.UntypedStorage]:
        return storages(tree, self.device)

    def see(self, storage: torch.UntypedStorage, before: int = 0) -> None:
        """Count the bytes that ``storage`` has now; it had ``before`` of them before the op, none if it is new."""
        key, nbytes = storage._cdata, rounded(storage.nbytes(), self.unit)
        before = rounded(before, self.unit)
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
    """When it comes depends on everything that the process did before."""
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


def storages(tree: Any, device: str | None = None) -> Iterator[torch.UntypedStorage]:
    """The storages of all dense tensors in ``tree`` on such a device, and of the tensors that a wrapper is made of."""
    for leaf in tree_leaves(tree):
        if not isinstance(leaf, Tensor):
            continue
        for part in parts_of(leaf):
            where = quick_device(part).type
            if part.layout is torch.strided and where != "meta" and device in (None, where):
                yield part.untyped_storage()
