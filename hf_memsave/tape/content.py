"""A content: what a storage held at one version. A ticket: a view of it. Autograd holds either, or another handle.

A content knows two things. *How it was made*: a :class:`Call`, known in forward only and never on the tape. *Where it
is*: nowhere yet; a ``tensor`` that is kept; or recomputed by ``make(*inputs, **named)``, whose inputs are handles of
other contents, codes, or what a hook outside made of the tensor. Every change of mind (a sweep, a freeze before a
write, a code that is forgotten) replaces the second in place: the holders of tickets do not notice.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_memsave.device import current_stream
from hf_memsave.errors import KeptTensorChangedError, MemSaveError
from hf_memsave.tape.handles import Handle, written
from hf_memsave.tape.private import after_backward, any_autocast, backward_id, no_autocast, no_subclasses
from hf_memsave.tape.tensors import CONSTANT, View, is_asked, is_plain, unexpanded, with_stride

#: Where a storage carries its content; a tape within another one (a checkpointed block) adds "_" to that one's mark.
MARK = "_memsave"
#: Tapes within each other; a deeper one hears of no write, so that its backward raises.
_DEEPEST = 4
#: Where it carries its entry in the ledger of a forward that is counted.
COUNTED = "_memsave_counted"


class Call:
    """The call ``func(*args, **kwargs)`` that made a tensor.

    ``seen`` are the tensors among the arguments, each with its version; where the call ``has_ghosts``, as its result is
    kept, ghosts stand for those that are not small. ``number`` is equal in forwards whose calls so far are.
    """

    __slots__ = ("func", "args", "kwargs", "seen", "number", "has_ghosts")

    def __init__(self, func: Any, args: Any, kwargs: Any, seen: Any, number: int, has_ghosts: bool = False) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.seen, self.number, self.has_ghosts = seen, number, has_ghosts


class Content(Handle):
    """What a storage held at one version: see above. Most cheap calls make one, so it has slots, all of them filled.

    ``owner`` is the lock of the hook context that it belongs to; None for parameters and buffers.
    """

    __slots__ = (
        "owner", "call", "tensor", "at", "make", "inputs", "named", "view", "is_handed_on", "is_lossy", "is_kept",
        "nbytes_code", "work", "depth", "first", "reads", "uses", "users", "shared", "version", "dtype", "stride",
        "nbytes", "is_input", "is_activation", "is_unversioned", "readers", "parts", "recomputable", "views",
    )  # fmt: skip

    #: Of storages that a sharding engine fills: see :class:`Sharded`.
    is_sharded = is_per_module = False

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.call: Any = None  # a Call

        # Where it is.
        self.tensor: Tensor | None = None
        self.at = -1  # the version of `tensor`
        self.make: Any = None
        self.inputs: Any = ()
        self.named: Any = None
        self.view: View | None = None  # of what a hook outside keeps (`is_handed_on`), or this is kept instead of
        self.is_handed_on = self.is_lossy = False
        self.is_kept = False  # its bytes are held: by its tensor, a hook outside, or the model's caller (`is_input`)
        self.nbytes_code = 0  # what is kept instead of a tensor, until that is kept anyway

        # What it takes to recompute it: functions, how deep they nest, and the earliest block that it builds on.
        self.work = self.depth = 0
        self.first = sys.maxsize
        self.reads: Any = ()  # storages of parameters: FSDP1 may free them

        # Who may ask in backward: so many holders of itself, and tickets, each of which holds `users`.
        self.uses = 0
        self.users = object()
        self.shared: _Shared | None = None

        # What the storage held.
        self.version = -1
        self.dtype: Any = None
        self.stride: Any = None
        self.nbytes = 0
        self.is_input = False
        self.is_activation = False  # it depends on the batch, though no autograd node says so
        self.is_unversioned = False  # it may be written to without its version telling

        # Who depends on it, weakly.
        self.readers: Any = ()  # contents with it among their inputs
        self.parts: Any = ()  # what stands in for it
        self.recomputable: Any = ()  # contents that are kept, though it alone would give them
        self.views: Any = ()  # what holds views of `tensor` for as long as that is kept

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether ``tensor``, on its storage, is a view of it."""
        dtype = self.dtype
        if self.version != tensor._version or tensor.dtype is not dtype or tensor.is_neg():
            return False
        return not (dtype.is_complex and tensor.is_conj())

    def holders(self) -> int:
        """Return how many may ask for it in backward; tickets of graphs that are gone do not count."""
        return self.uses + sys.getrefcount(self.users) - sys.getrefcount(_UNHELD.users)

    def is_there(self) -> bool:
        """Return whether no parameter that it reads is freed by now: outside its block, it would not be there."""
        return not self.reads or all(storage.nbytes() for storage in self.reads)

    def freed_by_keeping(self, version: int, calls: list[int]) -> int:
        """Return the bytes that others would forget if this were kept at ``version``; add the calls that tell it."""
        freed = sum(part.nbytes_code for part in alive(self.parts))
        for one in alive(self.recomputable):
            if one.is_kept and (call := one.call) is not None:
                if any(type(x) is Ghost and x.version == version for x, _ in call.seen):
                    freed += one.nbytes
                    calls.append(call.number)
        return freed

    # Changes of mind

    def become(self, make: Callable[..., Tensor], inputs: Any, named: Any = None, block: int = sys.maxsize) -> None:
        """Recompute it by ``make(*inputs, **named)`` from ``block`` on; tell :meth:`builds_on` of other contents."""
        self.call, self.make, self.inputs, self.named = None, make, inputs, named
        self.tensor, self.is_handed_on, self.is_lossy, self.nbytes_code = None, False, False, 0
        self.is_kept = self.is_input
        self.work, self.depth, self.first = 1, 1, block
        if self.views:
            for view in alive(self.views):
                view.forget()

    def keep(self, tensor: Tensor) -> None:
        """Keep ``tensor`` from now on: it is this content."""
        # Detached: an op that keeps its own output would otherwise own itself, through the output's grad_fn.
        self.tensor, self.at, self.is_kept = tensor if tensor.is_leaf else tensor.detach(), tensor._version, True
        if self.make is not None:
            self.make, self.inputs, self.named, self.work, self.depth, self.reads = None, (), None, 0, 0, ()

    def hand_on(self, tensor: Tensor, pack: Callable[[Tensor], Any], fetch: Callable[[Any], Tensor]) -> None:
        """Have a hook outside keep ``tensor`` from now on."""
        once, call = unexpanded(tensor), self.call
        stride = once.stride() if tensor.layout is torch.strided and is_plain(tensor) else None
        self.become(partial(_fetched, fetch, stride, tensor.shape, []), (pack(once),))
        self.view, self.work, self.depth, self.first, self.reads, self.call = View(tensor), 0, 0, sys.maxsize, (), call
        self.is_handed_on = self.is_kept = True

    def forget_code(self, content: Content) -> None:
        """Forget the code that this is: ``content`` gives the tensor that it was kept instead of from now on."""
        if content.is_handed_on:
            content.uses += 1
        self.become(same, [content if content.is_handed_on else Ticket(content, self.view)])

    def freeze(self) -> None:
        """Recompute it now, and keep the result: an input is about to be written to."""
        with self.owner:
            if self.make is not None and not self.is_handed_on:
                self.keep(self._made())

    def builds_on(self, other: Content) -> None:
        """Count ``other``, which gives an input, in what it takes to recompute this."""
        self.work += other.work
        if self.depth <= other.depth:
            self.depth = other.depth + 1
        if self.first > other.first:
            self.first = other.first
        self.is_lossy |= other.is_lossy
        if other.reads:
            self.reads = tuple({*self.reads, *other.reads})

    # Backward

    def get(self) -> Tensor:
        """Return the tensor: a kept one itself, else one that is recomputed once a backward, and after each write."""
        tensor = self.tensor
        if tensor is not None:
            if tensor._version != self.at:
                raise written(tensor, self.at)
            return tensor
        with self.owner:  # CUDA runs backward, and so this, on one thread per device
            task, shared = backward_id(), self.shared
            if shared is None or shared.task != task:
                if (holders := self.holders()) < 2:  # nothing to share
                    return self._made()
                shared = self.shared = _Shared(task, holders)
            return shared.get(self)

    def _made(self) -> Tensor:
        """Recompute its tensor, without gradients, and without autocast, whose casts were recorded as calls."""
        if self.is_handed_on:
            return self.make(*self.inputs)
        if torch.is_grad_enabled() or any_autocast():
            with torch.no_grad(), no_autocast():
                return self._made()
        for gather in getattr(self.make, "gathers", ()):  # before a view of a parameter is taken
            gather()
        args, names = fetched(self.inputs), self.named or {}
        named = dict(zip(names, fetched(names.values()), strict=True)) if names else names
        out: Tensor = self.make(*args, **named)
        if self.stride is None:
            return out
        dtype = out.dtype
        if dtype is not self.dtype is not None and dtype is torch.get_default_dtype():
            torch.set_default_dtype(self.dtype)  # of the forward: a quotient of whole numbers has that
            try:
                return self._made()
            finally:
                torch.set_default_dtype(dtype)
        if out.stride() != self.stride:
            out = with_stride(out, self.stride)
        if out.untyped_storage().nbytes() != self.nbytes:  # views of it would be read in the wrong place
            raise MemSaveError(
                f"{self.make} made {out.untyped_storage().nbytes()} bytes in backward, but {self.nbytes} in forward. "
                "Please report this; unpatch(model) trains without hf_memsave."
            )
        return out


class _Shared:
    """The tensor that one backward has recomputed for all holders of a content, until the last one has asked."""

    __slots__ = ("task", "left", "out", "version", "stream", "__weakref__")

    def __init__(self, task: int, holders: int) -> None:
        self.task, self.left = task, holders
        self.out: Tensor | None = None
        self.version, self.stream = 0, None

    def get(self, content: Content) -> Tensor:
        """Return the tensor, recomputed where it is not there yet, or was written to since."""
        self.left -= 1
        out = self.out
        if out is None or out._version != self.version:
            out = content._made()
            if self.left > 0 and self.task != -1:
                if self.out is None:  # a user may never ask, in a backward for a subset of the gradients
                    after_backward(partial(_drop, weakref.ref(self)))
                self.out, self.version = out, out._version
                self.stream = None if out.is_cpu else current_stream(out.device)
            return out
        # What one stream made and another one uses must be ready, and not be given away too early.
        if not out.is_cpu and (now := current_stream(out.device)) != self.stream:
            now.wait_stream(self.stream)
            out.record_stream(now)
        if self.left <= 0:
            self.out = None
        return out


#: Without tickets: what ``getrefcount`` counts in any case.
_UNHELD = Content(None)


class Ticket(Handle):
    """A view of a content."""

    __slots__ = ("content", "user", "shape", "stride", "offset")

    def __init__(self, content: Content, view: Any) -> None:
        self.content, self.user = content, content.users
        self.shape, self.stride, self.offset = view.shape, view.stride(), view.storage_offset()

    def get(self) -> Tensor:
        """Return the view, with the size, strides and offset of the one that was packed."""
        content = self.content
        out = content.tensor
        if out is None or out._version != content.at:  # not quickly
            out = content.get()
        if out.shape == self.shape and out.stride() == self.stride and out.storage_offset() == self.offset:
            return out
        return out.as_strided(self.shape, self.stride, self.offset)


class KeptView(Handle):
    """A view of a kept content, with the version it had: views by ``unsafe_chunk`` and ``.data`` have their own."""

    __slots__ = ("content", "tensor", "at", "ticket")

    def __init__(self, content: Content, tensor: Tensor) -> None:
        self.content = content
        self.ticket: Ticket | None = None
        self.tensor: Any = tensor if tensor.is_leaf else tensor.detach()
        self.at = tensor._version
        if (views := content.views) and len(views) < 8:
            views.append(weakref.ref(self))
        else:
            content.views = with_ref(views, self)

    def forget(self) -> None:
        """Forget the tensor, for a ticket."""
        if (view := self.tensor) is not None:
            self.ticket, self.tensor = Ticket(self.content, view), None

    def get(self) -> Tensor:
        """Return the very tensor that was kept; or the view that its content recomputes, if it is kept no more."""
        tensor, ticket = self.tensor, self.ticket
        if ticket is not None:
            return ticket.get()
        if tensor._version != self.at:
            raise written(tensor, self.at)
        return tensor


class Ghost(View):
    """An argument of the call of a content that is kept: there, if others keep it or can give it back."""

    __slots__ = ("of", "maker")

    def __init__(self, content: Content, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.of = weakref.ref(content)
        self.maker: Content | None = None  # has the call that made it, where that is known, with ghosts as arguments


#: Of parameters and buffers: kept whatever the tape does, but written to by optimizers and freed by FSDP.
PARAMETER, BUFFER = Content(None), Content(None)


def linked(storage: Any, mark: str = MARK) -> Content | None:
    """Return the content that ``storage`` carries: once that is on the tape, by a weak reference."""
    link: Any = getattr(storage, mark, None)
    return link() if type(link) is weakref.ref else link


def contents_on(storage: Any) -> Iterator[Content]:
    """Yield the contents of ``storage``, of the model's tape and of those of checkpointed blocks within."""
    for depth in range(_DEEPEST):
        if (content := linked(storage, MARK + depth * "_")) is not None:
            yield content


def is_parameter(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a parameter, or a view of one, which shares its version."""
    base = tensor._base
    whole = tensor if base is None else base
    return type(whole) is not Tensor and isinstance(whole, nn.Parameter)  # which asks in Python


def fetched(inputs: Iterable[Any]) -> list[Any]:
    """Return ``inputs`` with tensors in place of handles, in lists too."""
    found = []
    for a in inputs:
        if isinstance(a, Handle):
            a = a.get()
            if type(a) is not Tensor and is_asked(type(a)):
                a = _without_class(a)
        elif type(a) is list or type(a) is tuple:
            a = type(a)(fetched(a))
        found.append(a)
    return found


def mapped(argument: Any, fn: Callable[[Any], Any]) -> Any:
    """Return ``argument`` with ``fn(x)`` in place of each tensor and ghost x in it."""
    if isinstance(argument, (Tensor, Ghost)):
        return fn(argument)
    if type(argument) not in (list, tuple):
        return argument
    return type(argument)([a if type(a) in CONSTANT else mapped(a, fn) for a in argument])


def with_ref(refs: Any, item: Any) -> Any:
    """Return ``refs``, a list that this returned or an empty tuple, with a weak reference to ``item`` added."""
    if not refs:
        return [weakref.ref(item)]
    # At powers of two the dead are left out. (A ``WeakSet`` takes several times as long.)
    if len(refs) >= 8 and len(refs) & (len(refs) - 1) == 0:
        refs[:] = [ref for ref in refs if ref() is not None]
    refs.append(weakref.ref(item))
    return refs


def alive(refs: Iterable[weakref.ref[Any]]) -> Iterator[Any]:
    """Yield what weak references refer to, as far as it is alive."""
    return (one for ref in refs if (one := ref()) is not None)


def same(tensor: Tensor) -> Tensor:
    """Return ``tensor``: a content that another one gives is recomputed by this."""
    return tensor


def _without_class(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as a plain one: its class had its say in the forward."""
    with no_subclasses():
        return tensor.detach()


def _drop(shared: weakref.ref[_Shared]) -> None:
    if (alive := shared()) is not None:
        alive.out = None


def _fetched(fetch: Callable[[Any], Tensor], stride: Any, shape: Any, versions: list[int], packed: Any) -> Tensor:
    """Return what a hook outside gives back, with the strides that it was packed with."""
    out = fetch(packed)
    if type(out) is not Tensor and is_plain(out) and not isinstance(out, nn.Parameter):
        out = _without_class(out)
    if not versions:
        versions.append(out._version)
    elif versions[0] != out._version:  # the hook gives the same tensor each time, and a backward wrote to it
        raise KeptTensorChangedError(
            f"a {out.dtype} {list(out.shape)} that a saved-tensor hook keeps for several operations was written to by "
            "the backward of one of them. Have that backward write to a copy, or use no such hook."
        )
    return out if stride is None else with_stride(out, stride).expand(shape)
