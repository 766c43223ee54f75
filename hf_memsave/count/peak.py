"""Count the peak: the most bytes alive at once in a whole training step, op by op, without a GPU's allocator.

A dispatch mode sees every storage that an op makes, in forward and in backward, and a weak reference tells when that
storage dies. Not seen: buffers that a kernel frees before it returns, tensors that no op makes (generator states),
an allocator's fragmentation. Under any dispatch mode PyTorch adds the gradients of a tensor with several consumers
out of place, where otherwise it adds in place if it can: the count then has one more gradient of that tensor.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from hf_memsave.count.kept import KeptStorage, OpCall, StorageMode


@dataclass(frozen=True)
class Peak:
    """The result of :func:`count_peak`, in bytes above what was alive at the start."""

    peak: int  # the most that was alive at once
    end: int  # what is still alive after the step: gradients, if they were not there before, and whatever leaks
    timeline: tuple[tuple[str, int], ...]  # each op in turn, and the bytes alive when it returned


def count_peak(step: Callable[[], Any]) -> Peak:
    """Return the most bytes that are alive at once as ``step`` runs once, what is left at its end, and a timeline.

    ``step`` is a function such as ``lambda: model(**batch).loss.backward()``; what it returns is dropped. Every storage
    that an op in it makes counts once, on any device; an older one counts by its growth. Garbage collection is off:
    what hangs in a reference cycle counts to the end.
    """
    count, stock = Count(), torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:  # which is no op, and which no mode sees
        before = storage.nbytes()
        result = stock(storage, size)
        count.see(storage, before)
        return result

    try:
        with mock.patch.object(torch.UntypedStorage, "resize_", resize_), count:
            step()
        gc.collect()
        return Peak(count.peak, count.live, tuple(count.timeline))
    finally:
        count.made.clear()  # what is alive still has callbacks here


@dataclass
class _Counted:
    """A storage that counts: a weak reference that tells of its death, and its bytes, without those from before."""

    ref: weakref.ref[torch.UntypedStorage]
    before: int
    counted: int = 0
    maker: KeptStorage | None = None


class Count(StorageMode):
    """Count bytes alive of storages that ops make, rounded to ``unit``, on a ``device`` (None: all but "meta")."""

    def __init__(self, device: str | None = None, unit: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unit = unit
        self.counts = lambda kind: kind != "meta" if device is None else kind == device
        self.made: dict[int, _Counted] = {}
        self.live = self.peak = 0
        self.timeline: list[tuple[str, int]] = []
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Any:
        torch.clear_autocast_cache()  # a cast of a weight from before would not be counted
        if gc.isenabled():
            self._undo.callback(gc.enable)
        gc.disable()  # when it collects depends on everything that the process did before
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._undo.close()

    def after(self, call: OpCall, given: list[tuple[Any, int]], made: list[torch.UntypedStorage]) -> None:
        """Count the storages that the op made, and the change in size of those that it was given."""
        is_constant = call.func is torch.ops.aten.lift_fresh.default  # torch.tensor(...): made just now, by no op
        for storage, before in given:
            self.see(storage, 0 if is_constant else before)
        for storage in made:
            self.see(storage)
        self.note(call)

    def note(self, call: OpCall) -> None:
        """Record the op that ran and the bytes alive after it."""
        self.timeline.append((str(call.func), self.live))

    def see(self, storage: torch.UntypedStorage, before: int = 0) -> None:
        """Count the bytes that ``storage`` has now, without the ``before`` that an uncounted one had before the op."""
        key, nbytes, before = storage._cdata, rounded(storage.nbytes(), self.unit), rounded(before, self.unit)
        entry = self.made.get(key)
        if entry is None:
            if nbytes == before:  # from before the step, or empty
                return
            # The address can serve another storage only after the reference's callback has run.
            entry = self.made[key] = _Counted(weakref.ref(storage, partial(self._died, key)), before)
        counted = max(0, nbytes - entry.before)
        self.live += counted - entry.counted
        entry.counted = counted
        self.peak = max(self.peak, self.live)

    def _died(self, key: int, _: Any) -> None:
        entry = self.made.pop(key, None)
        if entry is not None:
            self.live -= entry.counted


def rounded(nbytes: int, unit: int) -> int:
    """Round ``nbytes`` up to a multiple of ``unit``."""
    return -(-nbytes // unit) * unit
