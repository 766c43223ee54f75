"""A promise: what goes on the autograd tape instead of a tensor that can be recomputed.

A promise lives *on the storage it can give back*: it is an attribute of the storage's Python object, which PyTorch
preserves for as long as the storage lives. So a promise that nobody took dies with its tensor, a new tensor at the same
address can never be mistaken for the old one, and there is no registry to purge or to lock.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.variable import Variable
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Keep = Callable[[Tensor], Any]
Fetch = Callable[[Any], Tensor]

_SLOT = "_memsave_slot"


class Promise:
    """How to compute one tensor again: ``recompute(*inputs)``, under the autocast state of the forward.

    Until somebody takes it, the promise holds its input tensors. The first :meth:`take` settles it: an input that is
    itself promised is held as that promise, any other one as whatever ``keep`` returns (the hook that is active
    outside our tape decides: a tensor, a copy on the CPU, the right to run a checkpointed block again).

    Args:
        output: The tensor to give back; it fills its storage.
        recompute: Returns a tensor of the same shape and bits when called with ``inputs``. Runs without gradients.
        inputs: Tensors only; anything else belongs into ``recompute``.
        sources: For each input, the promise that can give it back, or None.
        taken: Called with the inputs when the first :meth:`take` has settled the promise.
    """

    __slots__ = (
        "recompute", "stride", "autocast", "inputs", "held", "taken", "uses", "left", "task", "result", "lock",
        "__weakref__",
    )  # fmt: skip

    def __init__(
        self,
        output: Tensor,
        recompute: Callable[..., Tensor],
        inputs: tuple[Tensor, ...],
        sources: tuple[Promise | None, ...],
        taken: Callable[..., None] | None = None,
    ) -> None:
        self.recompute, self.taken = recompute, taken
        self.stride = output.stride()
        self.autocast = AutocastState(output.device.type)
        self.inputs = [(mine := _own(i), mine._version, s) for i, s in zip(inputs, sources, strict=True)]
        self.held: list[tuple[Any, tuple[int, ...] | None]] | None = None
        self.uses = self.left = 0
        self.task = -1
        self.result: Tensor | None = None
        self.lock = threading.RLock()  # CUDA runs backward, and so the recomputation, on one thread per device

    def take(self, view: Tensor, keep: Keep) -> Ticket | None:
        """A ticket for ``view``, some view of the promised tensor; None if an input has changed since."""
        if self.held is None and not self._settle(keep):
            return None
        self.uses += 1
        return Ticket(self, view)

    def sources(self) -> list[Tensor]:
        """The tensors that the first :meth:`take` would have to keep, those of promised inputs included."""
        found = []
        for tensor, _, source in self.inputs:
            found += [tensor] if source is None else source.sources()
        return found

    def _settle(self, keep: Keep) -> bool:
        if any(tensor._version != version for tensor, version, _ in self.inputs):
            return False
        held: list[tuple[Any, tuple[int, ...] | None]] = []
        kept: dict[Any, tuple[Any, tuple[int, ...] | None]] = {}
        for tensor, _, source in self.inputs:
            ticket = source.take(tensor, keep) if source is not None else None
            if ticket is not None:
                held.append((ticket, None))
                continue
            address = tensor.untyped_storage()._cdata, tensor.storage_offset()
            key = (address, tensor.shape, tensor.stride(), tensor.dtype)
            if key not in kept:
                handle = keep(tensor)
                kept[key] = handle, None if isinstance(handle, Ticket) else tensor.stride()
            held.append(kept[key])
        given, taken = self.inputs, self.taken
        self.held, self.inputs, self.taken = held, [], None
        if taken is not None:
            taken(*(tensor for tensor, _, _ in given))
        return True

    def get(self, fetch: Fetch) -> Tensor:
        """The promised tensor; computed once per backward, shared, and dropped after the last taker asked."""
        with self.lock:
            task = torch._C._current_graph_task_id()
            if task != self.task:
                self.task, self.left = task, self.uses
            if self.result is None:
                self.result = self._compute(fetch)
                if task != -1:  # a taker that never asks, in a backward for a subset of the gradients
                    Variable._execution_engine.queue_callback(partial(_drop, weakref.ref(self)))
            result = self.result
            self.left -= 1
            if self.left <= 0 or task == -1:
                self.result = None
            return result

    @torch.no_grad()
    def _compute(self, fetch: Fetch) -> Tensor:
        fetched: dict[int, Tensor] = {}  # a handle of an outer hook may be fetched only once per backward
        inputs = []
        for handle, stride in self.held or ():
            if stride is None:
                inputs.append(handle.get(fetch))
                continue
            if id(handle) not in fetched:
                fetched[id(handle)] = with_stride(fetch(handle), stride)
            inputs.append(fetched[id(handle)])
        with self.autocast:
            return with_stride(self.recompute(*inputs), self.stride)


def _own(tensor: Tensor) -> Tensor:
    # Of a norm's weight or bias (a 1-D floating-point leaf), a promise holds a private copy. FSDP2 frees those when
    # their block's forward ends, and gathers them again only for that block's backward, while the next block may need
    # the norm's output before. And optimizers write to them through .data, which no version counter sees.
    own = tensor.detach()
    return own.clone() if tensor.is_leaf and tensor.dim() == 1 and tensor.is_floating_point() else own


def _drop(promise: weakref.ref[Promise]) -> None:
    if (alive := promise()) is not None:
        alive.result = None


class Ticket:
    """What lies on the tape: a promise, and the view of its tensor that autograd wanted to keep."""

    __slots__ = ("promise", "shape", "stride", "offset")

    def __init__(self, promise: Promise, view: Tensor) -> None:
        self.promise = promise
        self.shape, self.stride, self.offset = view.shape, view.stride(), view.storage_offset()

    def get(self, fetch: Fetch) -> Tensor:
        """The view, of the same size, stride and offset as the one that was kept."""
        return self.promise.get(fetch).as_strided(self.shape, self.stride, self.offset)


class Slot:
    """Ties a promise to a storage, for one state of its contents (``version``) and one hook context."""

    __slots__ = ("promise", "version", "dtype", "context", "__weakref__")

    def __init__(self, promise: Promise, output: Tensor, context: object) -> None:
        self.promise: Promise | None = promise
        self.version, self.dtype, self.context = output._version, output.dtype, context


def attach(promise: Promise, output: Tensor, context: object) -> Slot:
    """Put ``promise`` on the storage of ``output``."""
    slot = Slot(promise, output, context)
    setattr(output.untyped_storage(), _SLOT, slot)
    return slot


def find(tensor: Tensor, context: object) -> Promise | None:
    """The promise for the storage of ``tensor``, if made in ``context`` and nobody wrote to the storage since."""
    if not is_plain(tensor):
        return None
    slot = getattr(tensor.untyped_storage(), _SLOT, None)
    if slot is None or slot.context is not context or slot.version != tensor._version or slot.dtype != tensor.dtype:
        return None
    return slot.promise


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor owns its bytes in a strided storage with a version counter, and reads them as they are."""
    return (
        tensor.layout is torch.strided
        and not is_traceable_wrapper_subclass(tensor)
        and not (tensor.is_inference() or tensor.is_conj() or tensor.is_neg())
    )


def fills_storage(tensor: Tensor) -> bool:
    """Whether every byte of the storage belongs to exactly one element of the tensor."""
    return tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes() and is_dense(tensor)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side in memory, in any order, without overlap."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def with_stride(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The tensor itself, or a copy that lies in memory as ``stride`` says: some sums depend on it."""
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class AutocastState:
    """The autocast state of a device type now, to be entered again later."""

    __slots__ = ("device", "enabled", "dtype", "inner")

    def __init__(self, device: str) -> None:
        self.device = device
        self.inner: torch.autocast | None = None
        self.enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        self.dtype = torch.get_autocast_dtype(device) if self.enabled else None

    def __enter__(self) -> None:
        now = AutocastState(self.device)
        if (now.enabled, now.dtype) != (self.enabled, self.dtype):
            self.inner = torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)
            self.inner.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.inner is not None:
            self.inner.__exit__(*error)
            self.inner = None
