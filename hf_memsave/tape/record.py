"""What lies on the tape, and what the tape knows of a storage.

A :class:`Record` lives *on the storage it tells of*, as an attribute of the storage's Python object, which PyTorch
preserves for as long as the storage lives. So a record that nobody took dies with its tensor, a new tensor at the same
address can never be mistaken for the old one, and there is no registry to purge or to lock.

Handles are what autograd, or another node, holds instead of a tensor; each has ``get()``:

- :class:`Held`: the tensor itself, checked for writes since.
- :class:`Lent`: what a foreign hook (checkpointing, offload, the user's own) made of the tensor.
- :class:`Ticket`: a view of what a :class:`Node` gives: a function, and the handles of its arguments.
- :class:`StandIn` and :class:`Blank`: less than the tensor, where one operation reads less of it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_memsave.errors import KeptTensorChangedError, MemSaveError
from hf_memsave.tape.private import after_backward, any_autocast, backward_id, no_autocast

#: Where a storage carries its record.
MARK = "_memsave"


class Record:
    """One storage, as one tape knows it: how it was made, and what has become of it.

    Attributes:
        tape: The tape it belongs to; to any other one the storage is unknown.
        func: What made it, called as ``func(*args, **kwargs)``; None where nobody knows, or once it was taken.
        args: As called; :class:`Weak` once the tensor is kept: what nobody else keeps could not have served anyway.
        kwargs: As called.
        seen: The tensors among them, in order, each with its version.
        version: Of the storage's contents, when it was made.
        dtype: Of the tensor that was made.
        stride: Of the tensor that was made; it fills the storage.
        is_kept: A handle holds the storage itself, or did: see :meth:`costs_nothing`.
        is_input: Whoever called the model holds it.
        is_weak: What it was made from is known weakly alone.
        is_distrusted: It may be written to without its version telling.
        key: Of the decision whether to keep it.
        number: In a ledger.
        is_activation: It depends on the batch, though nothing says so (a tensor made inside an autograd Function).
        handles: Those that hold the storage, or stand in for it, and may still give way to a ticket.
        node: The node that gives it back, if one was settled.
        remakes: What is kept, though this storage alone would give it back: records, their bytes, and at what version.
        around: The record that the tape around has of the storage.
        dependents: Nodes that hold the storage as an argument.
        notes: What others wish to find again with it.
    """

    # On the class, where most records leave them: a record is made at every call of a cheap function.
    func: Callable[..., Tensor] | None = None
    args: Any = None
    kwargs: Any = None
    seen: Any = None
    version = -1
    dtype: Any = None
    stride: Any = None
    is_kept = is_input = is_weak = is_activation = is_distrusted = False
    key = 0
    number: int | None = None
    handles: Any = ()
    node: weakref.ref[Node] | None = None
    remakes: Any = ()
    around: Record | None = None
    dependents: Any = ()
    notes: dict[Any, Any] | None = None

    def __init__(self, tape: Any) -> None:
        self.tape = tape

    def forget(self) -> None:
        """Let go of how it was made: somebody holds the tensor, and must not hold what it was made from."""
        self.func = self.args = self.kwargs = self.seen = None

    def costs_nothing(self) -> bool:
        """Whether somebody still holds the storage."""
        if self.is_kept and not self.is_input:
            for ref in reversed(self.handles):
                if (handle := ref()) is not None and type(handle) is not StandIn:
                    return True
            self.is_kept = False  # its holders are gone: a branch that nobody differentiates
            if self.is_weak:
                self.forget()
        return self.is_input

    def is_of(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a view of what was made, as it was made."""
        return self.version == tensor._version and self.dtype == tensor.dtype and not is_flipped(tensor)

    def nbytes_let_go(self, version: int) -> int:
        """What would be let go of if the storage itself were kept, as it is at ``version``."""
        if not self.handles and not self.remakes:
            return 0
        stand_ins = [h for ref in self.handles if isinstance(h := ref(), StandIn)]
        kept = [(n, ref()) for ref, n, seen in self.remakes if seen == version]
        let_go = [n for n, r in kept if r is not None and r.func is not None and r.costs_nothing()]
        return sum(s.nbytes for s in stand_ins) + sum(let_go)

    def give_way(self, node: Node) -> None:
        """Have all handles of what was made ask ``node`` instead; those of what was written to it later stay."""
        left = []
        for ref in self.handles:
            if (handle := ref()) is None:
                continue
            if handle.version == self.version and not handle.is_flipped():
                handle.give_way(node)
            else:
                left.append(ref)
        self.handles, self.is_kept = tuple(left), bool(left)


#: On the storage of a parameter: kept whatever the tape does, but written to by optimizers and freed by FSDP.
PARAMETER = Record(None)
#: On the storage of a buffer: kept whatever the tape does.
BUFFER = Record(None)


class Handle:
    """Anything on the tape that can give a tensor back."""

    __slots__ = ()

    def get(self) -> Tensor:
        """The tensor, of the size, strides and offset of the one that was kept."""
        raise NotImplementedError


class Held(Handle):
    """A tensor on the tape, which may still give way (``via``) to another handle."""

    __slots__ = ("tensor", "version", "via", "__weakref__")

    def __init__(self, tensor: Tensor) -> None:
        # Detached: an op that keeps its own output would otherwise own itself, through the output's grad_fn.
        self.tensor: Tensor | None = tensor if tensor.is_leaf else tensor.detach()
        self.version = tensor._version
        self.via: Handle | None = None

    def give_way(self, node: Node) -> None:
        """Ask ``node``, which gives the same tensor, instead."""
        self.via, self.tensor = Ticket(node, self.tensor), None

    def is_flipped(self) -> bool:
        """Whether it is a conjugate or negative view."""
        return self.tensor is not None and is_flipped(self.tensor)

    def get(self) -> Tensor:
        """The tensor, unless it was written to: autograd's own check, which Python hooks switch off."""
        tensor = self.tensor
        if tensor is None:
            return self.via.get()  # type: ignore[union-attr]
        if tensor._version != self.version:
            raise KeptTensorChangedError(
                f"a tensor needed for gradient computation has been modified by an inplace operation: {tensor.dtype} "
                f"{list(tensor.shape)} was kept at version {self.version} and is now at version {tensor._version}. "
                "Write to it after backward(), or use the out-of-place form of the operation."
            )
        return tensor


class Shared(Handle):
    """Gives a tensor that is made on demand, once per backward, and dropped after the last of its users asked."""

    __slots__ = ("uses", "left", "task", "out", "seen", "stream", "lock", "__weakref__")

    def __init__(self, lock: Any) -> None:
        self.uses = self.left = 0
        self.task = -1
        self.out: Tensor | None = None
        self.lock = lock  # CUDA runs backward, and so this, on one thread per device

    def make(self) -> Tensor:
        """The tensor, made anew."""
        raise NotImplementedError

    def get(self) -> Tensor:
        """The tensor; made again if somebody wrote to it since."""
        with self.lock:
            task = backward_id()
            if task != self.task:
                self.task, self.left, self.out = task, self.uses, None
            self.left -= 1
            out = self.out
            if out is None or out._version != self.seen:
                out = self.make()
                if self.left > 0 and task != -1:
                    self._share(out)
                return out
            if out.is_cuda:
                self._wait(out)
            if self.left <= 0:
                self.out = None
            return out

    def _share(self, out: Tensor) -> None:
        if self.out is None:  # a user may never ask, in a backward for a subset of the gradients
            after_backward(partial(_drop, weakref.ref(self)))
        self.out, self.seen = out, out._version
        if out.is_cuda:
            self.stream = torch.cuda.current_stream(out.device)

    def _wait(self, out: Tensor) -> None:
        """What one stream made and another one uses must be ready, and not be given away too early."""
        now = torch.cuda.current_stream(out.device)
        if now != self.stream:
            now.wait_stream(self.stream)
            out.record_stream(now)


def _drop(shared: weakref.ref[Shared]) -> None:
    if (alive := shared()) is not None:
        alive.out = None


class Node(Shared):
    """A record that was taken: a function, and its arguments as handles.

    Attributes:
        work: Functions that one call runs when nothing is at hand.
        block: The block that it was made in.
        first: The earliest block that it builds on.
        reads: Storages of parameters that it reads, or nodes that it builds on: FSDP2 may free them.
        is_lossy: What it gives is not the tensor to the bit.
    """

    __slots__ = (
        "func",
        "args",
        "kwargs",
        "stride",
        "nbytes",
        "work",
        "block",
        "first",
        "is_lossy",
        "reads",
        "fixed",
    )

    def __init__(
        self, func: Callable[..., Tensor], stride: tuple[int, ...], nbytes: int, block: int, lock: Any
    ) -> None:
        super().__init__(lock)
        self.func, self.stride, self.nbytes = func, stride, nbytes
        self.fixed: Handle | None = None
        self.args: Any = ()
        self.kwargs: Any = None
        self.work, self.block, self.first = 1, block, block
        self.is_lossy = False
        self.reads: tuple[Any, ...] = ()

    def builds_on(self, other: Node) -> None:
        """``other`` gives an argument."""
        self.work += other.work
        self.first = min(self.first, other.first)
        self.is_lossy |= other.is_lossy
        if other.reads:
            self.reads = tuple({*self.reads, *other.reads})

    def make(self) -> Tensor:
        """The function, run again without gradients, and without autocast: its casts stand among the records."""
        if self.fixed is not None:
            return self.fixed.get()
        if torch.is_grad_enabled() or any_autocast():
            with torch.no_grad(), no_autocast():
                return self._run()
        return self._run()

    def _run(self) -> Tensor:
        args = [a.get() if isinstance(a, Handle) else fetched(a) for a in self.args]
        if self.kwargs:
            out = self.func(*args, **{name: fetched(a) for name, a in self.kwargs.items()})
        else:
            out = self.func(*args)
        if out.stride() != self.stride:
            out = with_stride(out, self.stride)
        if out.untyped_storage().nbytes() != self.nbytes:  # views of it would be read in the wrong place
            raise MemSaveError(
                f"{self.func} made {out.untyped_storage().nbytes()} bytes in backward, but {self.nbytes} in forward. "
                "Please report this; unpatch(model) trains without hf_memsave."
            )
        return out

    def fix(self, handle: Handle) -> None:
        """Give what ``handle`` does from now on, and let go of the arguments."""
        with self.lock:
            self.fixed, self.args, self.kwargs, self.work, self.reads = handle, (), None, 0, ()

    def is_there(self) -> bool:
        """Whether nobody has freed what it reads: what is there after its own block, is there in backward."""
        return all(storage.nbytes() for storage in self.reads)

    def freeze(self) -> None:
        """Run now, and keep the result: an argument is about to be written to."""
        with self.lock:
            if self.fixed is None:
                self.fix(Held(self.make()))


class Lent(Shared):
    """A tensor that a foreign hook keeps, as whatever it made of it; it may still give way to another handle."""

    __slots__ = ("handle", "fetch", "view", "version", "lent_stride", "via")

    def __init__(
        self, tensor: Tensor, pack: Callable[[Tensor], Any], fetch: Callable[[Any], Tensor], lock: Any
    ) -> None:
        super().__init__(lock)
        self.uses = 1
        self.fetch, self.view, self.version = fetch, View(tensor), tensor._version
        once = unexpanded(tensor)
        self.handle, self.lent_stride = pack(once), once.stride()
        self.via: Handle | None = None

    def give_way(self, node: Node) -> None:
        """Ask ``node``, which gives the same tensor, instead."""
        self.via, self.handle = Ticket(node, self.view), None

    def is_flipped(self) -> bool:
        """Whether it is a conjugate or negative view."""
        return self.view.is_flipped

    def get(self) -> Tensor:
        """The tensor; a foreign hook is asked once per backward."""
        return super().get() if self.via is None else self.via.get()

    def make(self) -> Tensor:
        """The tensor, as it lay in memory."""
        return with_stride(self.fetch(self.handle), self.lent_stride).expand(self.view.shape)


class Ticket(Handle):
    """A view of what a node gives."""

    __slots__ = ("node", "shape", "stride", "offset")

    def __init__(self, node: Node, view: Any) -> None:
        node.uses += 1
        self.node = node
        self.shape, self.stride, self.offset = view.shape, view.stride(), view.storage_offset()

    def get(self) -> Tensor:
        """The view, of the same size, stride and offset as the one that was kept."""
        out = self.node.get()
        if out.shape == self.shape and out.stride() == self.stride and out.storage_offset() == self.offset:
            return out
        return out.as_strided(self.shape, self.stride, self.offset)


class View:
    """The geometry of a tensor, without its bytes."""

    __slots__ = ("shape", "_stride", "_offset", "dtype", "version", "is_flipped")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self._stride, self._offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        self.dtype, self.version, self.is_flipped = tensor.dtype, tensor._version, is_flipped(tensor)

    def stride(self) -> tuple[int, ...]:
        """As of the tensor."""
        return self._stride

    def storage_offset(self) -> int:
        """As of the tensor."""
        return self._offset

    def is_of(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, on the same storage, has this geometry and content."""
        mine = self.shape, self._stride, self._offset, self.dtype, self.version, self.is_flipped
        theirs = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
        return mine == (*theirs, tensor._version, is_flipped(tensor))


class StandIn(Handle):
    """Something smaller than the tensor, which suffices for one operation; it gives way if the tensor is kept anyway.

    Args:
        tensor: What the operation asked to keep.
        small: A handle of what stands for it.
        nbytes: What that takes.
        decode: Makes a tensor from that, for the operation to read; None if the operation decodes by itself.
    """

    __slots__ = ("view", "version", "small", "nbytes", "decode", "via", "__weakref__")

    def __init__(self, tensor: Tensor, small: Handle, nbytes: int, decode: Callable[[Tensor], Tensor] | None) -> None:
        self.view, self.version, self.decode, self.nbytes = View(tensor), tensor._version, decode, nbytes
        self.small: Handle | None = small
        self.via: Handle | None = None

    def give_way(self, node: Node) -> None:
        """Ask ``node``, which gives the tensor, instead; not one that gives it approximately."""
        if not node.is_lossy:
            self._become(Ticket(node, self.view))

    def is_flipped(self) -> bool:
        """Whether it stands for a conjugate or negative view."""
        return self.view.is_flipped

    def is_kept_as(self, tensor: Tensor, handle: Handle) -> None:
        """Share the bytes of ``tensor``, of the same storage, which ``handle`` now keeps."""
        view = self.view
        if type(handle) is Lent:
            if view.is_of(tensor):
                handle.uses += 1
                self._become(handle)
        elif view.version == tensor._version and view.dtype == tensor.dtype and not is_flipped(tensor):
            mine = tensor.detach().as_strided(view.shape, view.stride(), view.storage_offset())
            self._become(Held(mine))

    def _become(self, handle: Handle) -> None:
        self.via, self.small, self.decode = handle, None, None

    def get(self) -> Tensor:
        """The tensor, or what ``decode`` makes of what stands for it."""
        if self.via is not None:
            return self.via.get()
        small = self.small.get()  # type: ignore[union-attr]
        return small if self.decode is None else self.decode(small)


class Blank(Handle):
    """The geometry of a tensor whose values backward does not read."""

    __slots__ = ("shape", "stride", "dtype", "device")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.stride, self.dtype, self.device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device

    def get(self) -> Tensor:
        """NaNs, which show if they are ever read. They lie in the tensor's layout, by which kernels choose theirs."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).fill_(torch.nan)


class Weak(View):
    """An argument of a record whose tensor is kept: there, if somebody else keeps it or can give it back.

    Attributes:
        record: Of its storage.
        recipe: How it was made, where that is known: a record whose own arguments are weak.
        nbytes: Of its storage.
    """

    __slots__ = ("record", "recipe", "nbytes")

    def __init__(self, record: Record, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.record = weakref.ref(record)
        self.recipe: Record | None = None
        self.nbytes = 0


def is_flipped(tensor: Tensor) -> bool:
    """Whether the storage holds the conjugate or the negative of what the tensor is."""
    return tensor.is_neg() or tensor.is_conj()


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is no wrapper around others, which have storages of their own."""
    known = _PLAIN.get(type(tensor))
    if known is None:
        known = _PLAIN[type(tensor)] = not is_traceable_wrapper_subclass(tensor)
    return known


_PLAIN: dict[type, bool] = {Tensor: True, nn.Parameter: True}


def plain_tensors(args: Any) -> list[tuple[Tensor, int]] | None:
    """The tensors in ``args`` and their versions, where nothing but plain ones and numbers is there; else None."""
    found = []
    for a in args:
        kind = type(a)
        if kind is Tensor or kind is nn.Parameter:
            found.append((a, a._version))
        elif kind is not float and kind is not int and kind is not torch.dtype:
            return None
    return found


def owned(argument: Any) -> Any:
    """A copy of the lists and arrays in an argument, which their owner may change later."""
    if isinstance(argument, (list, tuple)):
        items = [owned(a) for a in argument]
        return items if isinstance(argument, list) else tuple(items)
    if type(argument) is dict:
        return {k: owned(a) for k, a in argument.items()}
    return copy.copy(argument) if isinstance(argument, np.ndarray) else argument


def leaves(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among the arguments of a call, and in lists of them, in order."""
    found = []
    for a in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(a, Tensor):
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found += leaves(a, None)
    return found


def arguments(args: Any, kwargs: Any) -> list[Tensor | Weak]:
    """The same, where tensors may be held weakly."""
    found = []
    for a in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(a, (Tensor, Weak)):
            found.append(a)
        elif type(a) in (list, tuple):
            found += arguments(a, None)
    return found


def replaced(argument: Any, handles: Iterator[Any]) -> Any:
    """An argument with the next of ``handles`` in place of each tensor that :func:`arguments` finds in it."""
    if type(argument) in (list, tuple):
        return type(argument)([replaced(a, handles) for a in argument])
    return next(handles) if isinstance(argument, (Tensor, Weak)) else argument


def fetched(argument: Any) -> Any:
    """An argument of a node, with tensors in place of handles."""
    if isinstance(argument, Handle):
        return argument.get()
    if type(argument) in (list, tuple):
        return type(argument)([fetched(a) for a in argument])
    return argument


def with_stride(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The tensor itself, or a copy that lies in memory as ``stride`` says: some sums depend on it."""
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def unexpanded(tensor: Tensor) -> Tensor:
    """The tensor, or the part of it that ``expand`` has repeated."""
    stride = tensor.stride()
    if 0 not in stride or not tensor.numel():
        return tensor
    return tensor[tuple([slice(None, 1) if s == 0 else slice(None) for s in stride])]


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side in memory, in any order, without overlap."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()
