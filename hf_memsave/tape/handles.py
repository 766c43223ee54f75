"""What lies on the tape instead of a tensor: what autograd, or another node, holds, and asks by ``get()``.

- :class:`Held`: the tensor itself, checked for writes since.
- :class:`Lent`: what a foreign hook (checkpointing, offload, the user's own) made of the tensor.
- :class:`Ticket`: a view of what a :class:`Node` gives: a function, and the handles of its arguments.

:mod:`~hf_memsave.tape.stand_ins` has those that hold less than the tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_memsave.device import current_stream
from hf_memsave.errors import KeptTensorChangedError, MemSaveError
from hf_memsave.tape.private import after_backward, any_autocast, backward_id, no_autocast, no_subclasses
from hf_memsave.tape.tensors import View, is_flipped, is_plain, unexpanded, with_stride


class Handle:
    """Anything on the tape that can give a tensor back."""

    __slots__ = ("__weakref__",)

    def get(self) -> Tensor:
        """The tensor, of the size, strides and offset of the one that was kept."""
        raise NotImplementedError


class Held(Handle):
    """A tensor on the tape, which may still give way (``via``) to another handle."""

    __slots__ = ("tensor", "version", "via")

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
            raise written(tensor, self.version)
        return tensor


class OnDemand(Handle):
    """Gives a tensor that is made on demand, once per backward, and dropped after the last of its users asked."""

    # On the class, where most leave them, as those of a record.
    uses = left = 0
    task = -1
    out: Tensor | None = None
    seen = 0
    stream: Any = None

    def __init__(self, lock: Any) -> None:
        self.lock = lock  # CUDA runs backward, and so this, on one thread per device

    def make(self) -> Tensor:
        """The tensor, made again."""
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
            if not out.is_cpu:
                self._wait(out)
            if self.left <= 0:
                self.out = None
            return out

    def _share(self, out: Tensor) -> None:
        if self.out is None:  # a user may never ask, in a backward for a subset of the gradients
            after_backward(partial(_drop, weakref.ref(self)))
        self.out, self.seen = out, out._version
        if not out.is_cpu:
            self.stream = current_stream(out.device)

    def _wait(self, out: Tensor) -> None:
        """What one stream made and another one uses must be ready, and not be given away too early."""
        now = current_stream(out.device)
        if now != self.stream:
            now.wait_stream(self.stream)
            out.record_stream(now)


def _drop(shared: weakref.ref[OnDemand]) -> None:
    if (alive := shared()) is not None:
        alive.out = None


class Node(OnDemand):
    """A record that was taken: a function, and its arguments as handles.

    Attributes:
        work: Functions that one call runs when nothing is at hand.
        block: The block that it was made in.
        first: The earliest block that it builds on.
        depth: How many calls of functions one call nests.
        reads: Storages of parameters that it reads, or nodes that it builds on: FSDP1 may free them.
        dtype: Of what it gives; None where that is known by itself.
        is_lossy: What it gives is not the tensor to the bit.
        via: The node that gives the same tensor, if this one has given way.
    """

    args: Any = ()
    kwargs: Any = None
    fixed: Handle | None = None
    via: Node | None = None
    work = depth = 1
    is_lossy = False
    reads: tuple[Any, ...] = ()

    def __init__(
        self,
        func: Callable[..., Tensor],
        stride: tuple[int, ...],
        nbytes: int,
        block: int,
        lock: Any,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.func, self.stride, self.nbytes, self.dtype = func, stride, nbytes, dtype
        self.lock, self.block, self.first = lock, block, block

    def builds_on(self, other: Node) -> None:
        """``other`` gives an argument."""
        self.work += other.work
        self.depth = max(self.depth, other.depth + 1)
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
        for gather in getattr(self.func, "gathers", ()):  # before a view of a parameter is taken
            gather()
        args = [a.get() if isinstance(a, Handle) else fetched(a) for a in self.args]
        kwargs = {name: fetched(a) for name, a in self.kwargs.items()} if self.kwargs else {}
        out = self.func(*args, **kwargs)
        if self.dtype not in (None, out.dtype) and out.dtype is torch.get_default_dtype():
            return self._with_default(self.dtype)
        if out.stride() != self.stride:
            out = with_stride(out, self.stride)
        if out.untyped_storage().nbytes() != self.nbytes:  # views of it would be read in the wrong place
            raise MemSaveError(
                f"{self.func} made {out.untyped_storage().nbytes()} bytes in backward, but {self.nbytes} in forward. "
                "Please report this; unpatch(model) trains without hf_memsave."
            )
        return out

    def _with_default(self, dtype: torch.dtype) -> Tensor:
        """The function, run under the default dtype of the forward: what is made of whole numbers has that."""
        now = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return self._run()
        finally:
            torch.set_default_dtype(now)

    def nbytes_kept(self) -> int:
        """Of the tensors that it is made from and that it holds itself."""
        return sum(a.tensor.nbytes for a in self.args if type(a) is Held and a.tensor is not None)

    def is_given_by(self, node: Node) -> None:
        """Let go of all, and give what ``node`` gives: the same storage, whatever views of it are asked for."""
        node.uses += 1
        self.fixed, self.args, self.kwargs, self.via = node, (), None, node
        self.builds_on(node)

    def fix(self, handle: Handle) -> None:
        """Give what ``handle`` does from now on, and let go of the arguments."""
        with self.lock:
            self.fixed, self.args, self.kwargs, self.work, self.reads, self.depth = handle, (), None, 0, (), 1

    def is_there(self) -> bool:
        """Whether what it reads was not freed: what is there after its own block, is there in backward."""
        return all(storage.nbytes() for storage in self.reads)

    def freeze(self) -> None:
        """Run now, and keep the result: an argument is about to be written to."""
        with self.lock:
            if self.fixed is None:
                self.fix(Held(self.make()))


class Lent(OnDemand):
    """A tensor that a foreign hook keeps, as whatever it made of it; it may still give way to another handle."""

    def __init__(
        self, tensor: Tensor, pack: Callable[[Tensor], Any], fetch: Callable[[Any], Tensor], lock: Any
    ) -> None:
        super().__init__(lock)
        self.uses, self.fetch, self.view, self.version = 1, fetch, View(tensor), tensor._version
        once = unexpanded(tensor)
        self.handle = pack(once)
        self.lent_stride = once.stride() if tensor.layout is torch.strided and is_plain(tensor) else None
        self.fetched: int | None = None
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
        out = self.fetch(self.handle)
        if type(out) is not Tensor and is_plain(out) and not isinstance(out, torch.nn.Parameter):
            with no_subclasses():  # its class had its say in the forward
                out = out.detach()
        if self.fetched is None:
            self.fetched = out._version
        elif self.fetched != out._version:  # the hook gives the same tensor each time, and a backward wrote to it
            raise KeptTensorChangedError(
                f"a {out.dtype} {list(out.shape)} that a saved-tensor hook keeps for several operations was written to "
                "by the backward of one of them. Have that backward write to a copy, or use no such hook."
            )
        return out if self.lent_stride is None else with_stride(out, self.lent_stride).expand(self.view.shape)


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


def written(tensor: Tensor, version: int) -> KeptTensorChangedError:
    """What to raise of a tensor that was kept at ``version``."""
    return KeptTensorChangedError(
        f"a tensor needed for gradient computation has been modified by an inplace operation: {tensor.dtype} "
        f"{list(tensor.shape)} was kept at version {version} and is now at version {tensor._version}. "
        "Write to it after backward(), or use the out-of-place form of the operation."
    )


def fetched(argument: Any) -> Any:
    """An argument of a node, with tensors in place of handles."""
    if isinstance(argument, Handle):
        return argument.get()
    if type(argument) in (list, tuple):
        return type(argument)([fetched(a) for a in argument])
    return argument
