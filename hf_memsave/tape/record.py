"""What the tape knows of a storage.

A :class:`Record` lives *on the storage it tells of*, as an attribute of the storage's Python object, which PyTorch
preserves for as long as the storage lives. So a record that nobody took dies with its tensor, a new tensor at the same
address can never be mistaken for the old one, and there is no registry to purge or to lock.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from hf_memsave.tape.handles import Lent, Node
from hf_memsave.tape.stand_ins import StandIn
from hf_memsave.tape.tensors import View, is_flipped

#: Where a storage carries its record.
MARK = "_memsave"
#: Where it carries its entry in the ledger of a forward that is counted.
COUNTED = "_memsave_counted"


class _Refs(list[Any]):
    """Weak references, or tuples that begin with one, and how many of them it takes to look which are gone."""

    __slots__ = ("most",)


def added(refs: Any, ref: Any) -> Any:
    """Weak references, in a tuple or as this gave them, and another one; those to what is gone go now and then.

    Returns:
        At most twice as many as are alive, or a few.
    """
    if not refs:  # mostly
        return (ref,)
    if type(refs) is not _Refs:
        refs = _Refs(refs)
        refs.most = 8
    if len(refs) >= refs.most:
        refs[:] = [r for r in refs if (r[0] if type(r) is tuple else r)() is not None]
        refs.most = max(8, 2 * len(refs))
    refs.append(ref)
    return refs


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
        made: Of the call that made it, the same in every forward that does the same.
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
    is_sharded = is_brief = False
    key = made = 0
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

    def lent(self, tensor: Tensor) -> Lent | None:
        """The handle by which a foreign hook keeps this very view already."""
        for ref in () if self.is_distrusted else self.handles:
            lent = ref()
            if type(lent) is Lent and lent.via is None and lent.view.is_of(tensor):
                return lent
        return None

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


class Sharded(Record):
    """On the storage of a parameter that a sharding engine fills, empties and moves by itself.

    Attributes:
        is_brief: It is there only while its own module runs, forward or backward; others while its block does.
        gather: Has the engine bring it back in backward, where the engine can.
    """

    is_sharded = True
    #: A parameter was brief in this process: from now on tapes copy small ones as they see them.
    any_is_brief = False

    def __init__(self, is_brief: bool, gather: Callable[[], None] | None = None) -> None:
        super().__init__(None)
        self.is_brief, self.gather = is_brief, gather
        Sharded.any_is_brief |= is_brief


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
