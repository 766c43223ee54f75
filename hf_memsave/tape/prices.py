"""What it costs to have a tensor in backward: to keep it, or to remake it from what is kept, or would have to be.

The price of a record is a number of new bytes (the storages that nobody keeps yet, among what it was made from) and of
functions to run. Each argument is kept already, or remade in turn, or kept now, whichever is less.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_memsave.tape.record import (
    MARK,
    PARAMETER,
    Handle,
    Held,
    Node,
    Record,
    Ticket,
    Weak,
    arguments,
    leaves,
    replaced,
)

#: Functions that remaking one tensor may run.
MOST_WORK = 64
#: How many blocks back a tensor may be remade from. A chain through all of them (an fp32 residual sum, remade from the
#: sum before it) would cost a step's time, and its peak: see :func:`anchor`.
SPAN = 2
#: Bytes that are not worth a question.
TINY = 64
#: So small a part of a tensor is held while it is open whether that can be remade from it.
SMALL = 64
#: Conversions: what a parameter is converted to, its own module needs, so the parameter is there in backward.
CASTS = frozenset({Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double})

New = dict[Any, int]


def pays(tape: Any, record: Record, nbytes: int) -> bool:
    """Whether remaking the record's tensor keeps less than ``nbytes``."""
    found = price(tape, record)
    return found is not None and found[1] <= MOST_WORK and sum(found[0].values()) < nbytes


def price(tape: Any, record: Record, known: Collection[Any] = ()) -> tuple[New, int] | None:
    """What remaking would newly keep.

    Args:
        tape: The one whose record it is.
        record: Not taken yet.
        known: Storages that will be kept anyway, by address.

    Returns:
        Address -> bytes, and how many functions it runs; None if an argument has been written to since.
    """
    new: New = {}
    work = 1
    for x, version in zip(leaves(record.args, record.kwargs), record.seen, strict=True):
        if x._version != version:
            return None
        storage = x.untyped_storage()
        theirs = getattr(storage, MARK, None)
        if theirs is None or theirs.tape is not tape:
            theirs = tape.record_of(x)
        if theirs.is_distrusted:
            return None
        if id(storage) in new or id(storage) in known or (theirs.is_kept and theirs.costs_nothing()):
            continue
        inner, more = price_of(tape, x, theirs, storage, (*known, *new), record.func, MOST_WORK - work)
        if inner:
            new.update(inner)
        work += more
    return new, work


def price_of(
    tape: Any, x: Tensor, record: Record, storage: Any, known: Collection[Any] = (), func: Any = None, most: int = 64
) -> tuple[New, int]:
    """The same for having one argument ``x`` of ``func``, with at most ``most`` functions."""
    if record.tape is None:
        return _price_of_parameter(tape, x, storage, _is_copied(x, record, func)), 0
    if record.costs_nothing():
        return {}, 0
    node = None if record.node is None else record.node()
    if node is not None:
        if record.is_of(x) and _is_near(tape, node):
            return {}, node.work
    elif record.func is not None and record.is_of(x):
        found = price(tape, record, known)
        if found is not None and found[1] <= most and sum(found[0].values()) < storage.nbytes():
            return found
    return {id(storage): max(0, storage.nbytes() - record.nbytes_let_go())}, 0


def _price_of_parameter(tape: Any, x: Tensor, storage: Any, is_copied: bool) -> New:
    """Nothing, or a copy's bytes; it cannot be had where FSDP2 has freed it."""
    if not storage.nbytes() and x.numel() and not (is_copied and tape.has_copy(x)):
        return {id(storage): sys.maxsize}
    return {id(storage): x.numel() * x.itemsize} if is_copied else {}


def settle(tape: Any, record: Record, storage: Any) -> Node:
    """Make a node of a record: its arguments become handles, and whoever holds the tensor itself asks the node."""
    node = Node(record.func, record.stride, storage.nbytes(), tape.block, tape.lock)  # type: ignore[arg-type]
    args, kwargs = record.args, record.kwargs
    record.forget()
    record.node = weakref.ref(node)
    node.args = [_take(tape, a, node) for a in args]
    if kwargs:
        node.kwargs = {name: _take(tape, a, node) for name, a in kwargs.items()}
    record.give_way(node)
    return node


def _take(tape: Any, argument: Any, node: Node) -> Any:
    if type(argument) in (list, tuple):
        return type(argument)([_take(tape, a, node) for a in argument])
    if not isinstance(argument, Tensor):
        return argument
    record = tape.record_of(argument)
    if record.tape is None:
        if _is_copied(argument, record, node.func):
            return tape.copy_of(argument)
        if _is_local(node.func):
            node.reads = (*node.reads, argument.untyped_storage())
        return tape.keep(argument)
    storage = argument.untyped_storage()
    theirs = None if record.node is None else record.node()
    handle: Handle | None = None
    if theirs is None or _is_near(tape, theirs):
        handle = tape.ticket(record, storage, argument)
    if handle is None:
        record.dependents = (*record.dependents, weakref.ref(node))
        tape.note(record, storage, argument, is_source=True)
        handle = tape.hold(record, storage, argument)
    if type(handle) is Ticket:
        node.builds_on(handle.node)
    return handle


def anchor(tape: Any, x: Tensor, depth: int, block: int) -> None:
    """What a block is given must not build on blocks too far back for it: keep a tensor in between.

    Args:
        tape: Whose block begins, or ends.
        x: What the block is given.
        depth: How many functions back to look for a tensor that is remade from such blocks.
        block: The number of the block.
    """
    record = tape.record_of(x)
    if record is None or record.tape is None or not record.is_of(x) or record.costs_nothing():
        return
    node = None if record.node is None else record.node()
    if node is not None:
        is_whole = x.stride() == node.stride and x.numel() * x.itemsize == node.nbytes
        is_far = block - node.first > SPAN or not node.is_there()
        if is_far and is_whole and node.fixed is None:
            handle = tape.keep(x)
            node.fix(handle)
            node.first, record.is_kept = tape.block, True
            record.handles = (*record.handles, weakref.ref(handle))
    elif record.func is not None and depth:
        for argument in leaves(record.args, record.kwargs):
            anchor(tape, argument, depth - 1, block)


def gather(tape: Any, x: Tensor, found: set[Record]) -> None:
    """Add to ``found`` the record of ``x``, and those of all that it was made from."""
    record = tape.record_of(x)
    if record is None or record.tape is None or record.is_weak or record.func is None or record in found:
        return
    found.add(record)
    for argument in leaves(record.args, record.kwargs):
        gather(tape, argument, found)
        if argument.dim() <= 1 and tape.record_of(argument) is PARAMETER:
            tape.copy_of(argument)  # while it is there


def _is_near(tape: Any, node: Node) -> bool:
    """Whether what is asked for now may build on ``node``."""
    return tape.block - node.first <= SPAN and node.is_there()


def _is_copied(x: Tensor, record: Record, func: Any) -> bool:
    """Whether a node of ``func`` holds a copy of a parameter or buffer ``x``, and not the thing itself."""
    return x.dim() <= 1 or (record is PARAMETER and func not in CASTS and not _is_local(func))


def _is_local(func: Any) -> bool:
    """Whether ``func`` reads a parameter that its own module's backward needs: a thin product, or dequantizing."""
    return func is F.linear or isinstance(func, torch._ops.OpOverload)


def weaken(tape: Any, record: Record, nbytes: int, depth: int = 1) -> Record:
    """A copy of a record, with weak arguments that remember how they were made, ``depth`` steps back.

    What is small beside its tensor of ``nbytes``, such as a row's mean, stays: until the sweep.

    Returns:
        The copy.
    """
    copy = Record(record.tape)
    small = max(min(TINY, nbytes // 8), nbytes // SMALL)
    copy.func, copy.seen, copy.version = record.func, record.seen, record.version
    copy.dtype, copy.stride = record.dtype, record.stride
    copy.args = [_weak(tape, record.func, a, small, depth) for a in record.args]
    if record.kwargs:
        copy.kwargs = {name: _weak(tape, record.func, a, small, depth) for name, a in record.kwargs.items()}
    return copy


def _weak(tape: Any, func: Any, argument: Any, small: int, depth: int) -> Any:
    """An argument of a record whose tensor is kept: held no more, unless it is kept too."""
    if type(argument) in (list, tuple):
        return type(argument)([_weak(tape, func, a, small, depth) for a in argument])
    if not isinstance(argument, Tensor):
        return argument
    record, storage = tape.record_of(argument), argument.untyped_storage()
    if record is PARAMETER and func not in CASTS and not _is_local(func):
        if argument.dim() > 1 or not (storage.nbytes() or tape.has_copy(argument)):
            return Weak(record, argument)  # no version tells of what optimizers do, and FSDP2
        tape.copy_of(argument)
        return argument
    if record.tape is None or storage.nbytes() <= small or record.costs_nothing():
        return argument
    weak = Weak(record, argument)
    if depth and record.func is not None and record.is_of(argument):
        weak.nbytes = storage.nbytes()
        weak.recipe = weaken(tape, record, weak.nbytes, depth - 1)
    return weak


def sweep(tape: Any, record: Record) -> None:
    """A tensor that was kept before it was known that others keep all it was made from gives way to a node."""
    if tape.outer is not None:
        return
    source = _recipe(tape, record)
    if source is None or source.work > MOST_WORK:
        return
    held = (h.tensor for ref in record.handles if type(h := ref()) is Held and h.tensor is not None)
    tensor = next(held, None)
    if tensor is None or not record.is_of(tensor):  # written to before it was kept
        return
    node = _node_of(tape, source, tensor.untyped_storage().nbytes())
    record.forget()
    record.node = weakref.ref(node)
    record.give_way(node)


class _Recipe(NamedTuple):
    """A function whose arguments can all be had for nothing, and where."""

    record: Record
    arguments: list[Any]
    sources: list[Any]
    work: int
    nbytes: int


def _recipe(tape: Any, record: Record, nbytes: int = 0) -> _Recipe | None:
    found = arguments(record.args, record.kwargs)
    sources = []
    for argument, version in zip(found, record.seen, strict=True):
        source = _source(tape, argument, version)
        if source is None:
            return None
        sources.append(source)
    work = 1 + sum(source.work for source in sources if isinstance(source, (Node, _Recipe)))
    return _Recipe(record, found, sources, work, nbytes)


def _source(tape: Any, argument: Tensor | Weak, version: int) -> Node | Tensor | _Recipe | None:
    """Where an argument can be had for nothing."""
    if isinstance(argument, Tensor):
        is_same = argument._version == version and not tape.record_of(argument).is_distrusted
        return argument if is_same else None
    record = argument.record()
    if argument.version != version or (record is not None and record.is_distrusted):
        return None
    if record is not None:
        node = None if record.node is None else record.node()
        if node is not None and record.version == version and record.dtype == argument.dtype:
            return node if _is_near(tape, node) else None
        for ref in record.handles:
            if type(held := ref()) is Held and held.tensor is not None and held.tensor.dtype == argument.dtype:
                return held.tensor if held.version == held.tensor._version == version else None
    return None if argument.recipe is None else _recipe(tape, argument.recipe, argument.nbytes)


def _node_of(tape: Any, recipe: _Recipe, nbytes: int) -> Node:
    record = recipe.record
    node = Node(record.func, record.stride, nbytes, tape.block, tape.lock)  # type: ignore[arg-type]
    pairs = zip(recipe.sources, recipe.arguments, strict=True)
    handles = iter([_of_source(tape, source, argument, node) for source, argument in pairs])
    node.args = [replaced(a, handles) for a in record.args]
    if record.kwargs:
        node.kwargs = {name: replaced(a, handles) for name, a in record.kwargs.items()}
    return node


@torch.no_grad()
def _of_source(tape: Any, source: Any, argument: Tensor | Weak, node: Node) -> Handle:
    if isinstance(source, _Recipe):
        source = _node_of(tape, source, source.nbytes)
    if isinstance(source, Node):
        node.builds_on(source)
        return Ticket(source, argument)
    if isinstance(argument, Weak):
        source = source.as_strided(argument.shape, argument.stride(), argument.storage_offset())
    return _take(tape, source, node)
