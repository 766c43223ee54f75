"""The sweep: what was kept before others kept all it was made from gives way to those when its block has ended."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_memsave.tape.copies import copy_of
from hf_memsave.tape.decisions import EVEN, NEVER, NO, YES
from hf_memsave.tape.handles import Handle, Held, Node, Ticket
from hf_memsave.tape.prices import SMALL, TINY, is_available, is_near, may_change, take
from hf_memsave.tape.record import Record, Weak, added, arguments, replaced


def wait(tape: Any, record: Record, nbytes: int) -> None:
    """The tensor is kept: hold what it was made from no more, but know it again if others keep it too."""
    if tape.decided[record.key] == NEVER:
        record.forget()
        return
    weak = weaken(tape, record, nbytes)
    record.args, record.kwargs, record.seen, record.is_weak = weak.args, weak.kwargs, weak.seen, True
    ref = weakref.ref(record)
    tape.kept.append(ref)
    sources = [a for a, _ in record.seen if type(a) is Weak]
    if len(sources) == 1 and tape.outer is None and (source := sources[0].record()) is not None:
        if source.tape is None:  # a parameter, which is always there
            return
        source.remakes = added(source.remakes, (ref, nbytes, sources[0].version))


def weaken(tape: Any, record: Record, nbytes: int, depth: int = 1) -> Record:
    """A copy of a record, with weak arguments that remember how they were made, ``depth`` steps back.

    What is small beside its tensor of ``nbytes``, such as a row's mean, stays: until the sweep.

    Returns:
        The copy.
    """
    copy = Record(record.tape)
    small = max(min(TINY, nbytes // 8), nbytes // SMALL)
    copy.func, copy.version, copy.dtype, copy.stride = record.func, record.version, record.dtype, record.stride
    copy.args = [_weak(tape, record.func, a, small, depth) for a in record.args]
    if record.kwargs:
        copy.kwargs = {name: _weak(tape, record.func, a, small, depth) for name, a in record.kwargs.items()}
    versions = [version for _, version in record.seen]
    copy.seen = list(zip(arguments(copy.args, copy.kwargs), versions, strict=True))
    return copy


def _weak(tape: Any, func: Any, argument: Any, small: int, depth: int) -> Any:
    """An argument of a record whose tensor is kept: held no more, unless it is kept too."""
    if type(argument) in (list, tuple):
        return type(argument)([_weak(tape, func, a, small, depth) for a in argument])
    if not isinstance(argument, Tensor):
        return argument
    record, storage = tape.record_of(argument), argument.untyped_storage()
    if may_change(argument, record, func):
        if argument.dim() > 1 or not is_available(tape, argument, record, func):
            return Weak(record, argument)  # no version tells of what optimizers do, and FSDP2
        copy_of(tape, argument)
        return argument
    if record.tape is None or storage.nbytes() <= small or record.costs_nothing():
        return argument
    weak = Weak(record, argument)
    if depth and record.func is not None and record.is_of(argument):
        tape.asked.add(record.made)
        weak.nbytes = storage.nbytes()
        weak.recipe = weaken(tape, record, weak.nbytes, depth - 1)
    return weak


def sweep(tape: Any, record: Record) -> None:
    """A tensor that was kept before it was known that others keep all it was made from gives way to a node."""
    if tape.outer is not None:
        return
    source = _recipe(tape, record)
    if source is None or source.work > tape.most_work:
        if tape.decided[record.key] in (NO, EVEN):
            tape.decided[record.key], tape.has_decided = NEVER, True
        record.forget()
        return
    held = (h.tensor for ref in record.handles if type(h := ref()) is Held and h.tensor is not None)
    tensor = next(held, None)
    if tensor is None or not record.is_of(tensor):  # written to before it was kept
        return
    is_even = tape.decided[record.key] == EVEN  # else a forward that goes on otherwise would keep more than stock
    if is_even and not any(isinstance(one, _Recipe) for one in source.sources):  # the next one need not wait for this
        tape.decided[record.key], tape.has_decided = YES, True
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
    sources = []
    for argument, version in record.seen:
        source = _source(tape, argument, version)
        if source is None:
            return None
        sources.append(source)
    work = 1 + sum(source.work for source in sources if isinstance(source, (Node, _Recipe)))
    return _Recipe(record, [argument for argument, _ in record.seen], sources, work, nbytes)


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
            return node if is_near(tape, node) else None
        for ref in record.handles:
            if type(held := ref()) is Held and held.tensor is not None and held.tensor.dtype == argument.dtype:
                is_same = held.version == held.tensor._version == version and not held.is_flipped()
                return held.tensor if is_same and not argument.is_flipped else None
    return None if argument.recipe is None else _recipe(tape, argument.recipe, argument.nbytes)


def _node_of(tape: Any, recipe: _Recipe, nbytes: int) -> Node:
    record = recipe.record
    node = Node(record.func, record.stride, nbytes, tape.block, tape.lock, record.dtype)  # type: ignore[arg-type]
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
    return take(tape, source, node)
