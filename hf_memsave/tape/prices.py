"""What it costs to have a tensor in backward: to keep it, or to remake it from what is kept, or would have to be.

The price of a record is a number of new bytes (the storages that are not kept yet, among what it was made from) and of
functions to run. Each argument is kept already, or remade in turn, or kept now, whichever is less.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hf_memsave.tape.again import LinearAgain
from hf_memsave.tape.copies import copy_of, has_copy
from hf_memsave.tape.handles import Handle, Node, Ticket
from hf_memsave.tape.private import OpOverload
from hf_memsave.tape.record import BUFFER, MARK, Record, added
from hf_memsave.tape.tensors import CONSTANT, is_flipped, place_of

#: Functions that remaking one tensor may run.
MOST_WORK = 64
#: How many records may be looked at for each other, and how many calls may nest in a node that is built on. Remaking a
#: tensor then nests twice as many at most, five of Python's frames each, of which there are 1000.
MOST_DEPTH = 64
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


class Question:
    """What is known while one price is found.

    Attributes:
        left: Records that may still be looked at.
        kept: Addresses of storages that it would cost less to keep than to remake.
        depth: Records that are looked at for each other now.
    """

    __slots__ = ("left", "kept", "depth")

    def __init__(self, most: int) -> None:
        self.left, self.depth = 4 * most, 0
        self.kept: set[int] = set()


def price(
    tape: Any, record: Record, known: Collection[Any] = (), question: Question | None = None, most: int | None = None
) -> tuple[New, int] | None:
    """What remaking would newly keep.

    Args:
        tape: The one whose record it is.
        record: Not taken yet.
        known: Storages that will be there anyway, by address.
        question: Within which this one is asked.
        most: Functions that it may run; as many as the tape allows, if None.

    Returns:
        Address -> bytes, and how many functions it runs; None if those are too many, or an argument has been written
        to since.
    """
    most = tape.most_work if most is None else most
    question = Question(most) if question is None else question
    question.left -= 1
    new: New = {}
    work = 1
    for x, version in record.seen:
        if x._version != version or work > most or question.left < 0:
            return None
        storage = x.untyped_storage()
        theirs = getattr(storage, MARK, None)
        if theirs is None or theirs.tape is not tape:
            theirs = tape.record_of(x)
        if theirs.is_distrusted:
            return None
        if id(storage) in new or id(storage) in known or (theirs.is_kept and theirs.costs_nothing()):
            continue
        so_far = (*known, *new) if new else known
        inner, more = price_of(tape, x, theirs, storage, so_far, record.func, question, most - work)
        new.update(inner)
        work += more
    return (new, work) if work <= most else None


def price_of(
    tape: Any,
    x: Tensor,
    record: Record,
    storage: Any,
    known: Collection[Any] = (),
    func: Any = None,
    question: Question | None = None,
    most: int | None = None,
) -> tuple[New, int]:
    """What having one argument ``x`` of ``func`` would newly keep, as :func:`price` tells it."""
    if record.tape is None:
        return _price_of_parameter(tape, x, record, func), 0
    if record.costs_nothing():
        return {}, 0
    node = None if record.node is None else record.node()
    if node is not None:
        if record.is_of(x) and is_near(tape, node):
            return {}, node.work
    elif record.func is not None and (question is None or id(storage) not in question.kept) and record.is_of(x):
        tape.asked.add(record.made)
        question = Question(tape.most_work) if question is None else question
        question.depth += 1
        found = price(tape, record, known, question, most) if question.depth < MOST_DEPTH else None
        question.depth -= 1
        if found is not None and sum(found[0].values()) < storage.nbytes():
            found[0][id(storage)] = 0  # who else needs it, finds it there
            return found
        question.kept.add(id(storage))
    return {id(storage): max(0, storage.nbytes() - record.nbytes_let_go(x._version))}, 0


def _price_of_parameter(tape: Any, x: Tensor, record: Record, func: Any) -> New:
    """Nothing, or a copy's bytes; without a copy it cannot be had where a sharding engine takes it away."""
    if not is_available(tape, x, record, func):
        return {id(x.untyped_storage()): sys.maxsize}
    is_copied = _is_copied(x, record, func) and not record.is_brief  # else the copy is there
    return {id(x.untyped_storage()): x.numel() * x.itemsize} if is_copied else {}


def is_available(tape: Any, x: Tensor, record: Record, func: Any) -> bool:
    """Whether a node of ``func`` will have a parameter or buffer ``x`` in backward.

    Returns:
        Of one that is there only while its own module runs, no more than whether there is a copy: a checkpointed block
        that runs again in backward may find it at other times than its forward did.
    """
    is_there = not record.is_brief and bool(x.untyped_storage().nbytes() or not x.numel())
    if _is_copied(x, record, func):
        return is_there or has_copy(tape, x)
    return is_there or record.is_brief or _is_gathered(func)


def settle(tape: Any, record: Record, storage: Any) -> Node:
    """Make a node of a record: its arguments become handles, and a handle that holds the tensor itself asks the node.

    Autocast converts an input for each product that takes it. Those conversions share the first one's node, so that
    backward converts once.

    Returns:
        The node.
    """
    func, args, kwargs = record.func, record.args, record.kwargs
    node = Node(func, record.stride, storage.nbytes(), tape.block, tape.lock, record.dtype)  # type: ignore[arg-type]
    if func in CASTS:
        x = record.seen[0][0]
        notes, key = tape.notes(x), (place_of(x), is_flipped(x), record.dtype, record.stride)
        if key in notes and (first := notes[key]()) is not None and is_near(tape, first):
            node, args, kwargs = first, (), None
        notes[key] = weakref.ref(node)
    if type(func) is LinearAgain and tape.ledger is not None:
        tape.ledger.note_run_again(storage.nbytes())
    record.forget()
    record.node = weakref.ref(node)
    if args:
        node.args = [take(tape, a, node) if type(a) not in CONSTANT else a for a in args]
    if kwargs:
        node.kwargs = {name: take(tape, a, node) for name, a in kwargs.items()}
    if record.handles:
        record.give_way(node)
    return node


def take(tape: Any, argument: Any, node: Node) -> Any:
    """A handle of an argument of ``node``: kept already, remade in turn, or kept from now on."""
    if not isinstance(argument, Tensor):
        is_many = type(argument) in (list, tuple)
        return type(argument)([take(tape, a, node) for a in argument]) if is_many else argument
    storage = argument.untyped_storage()
    record = getattr(storage, MARK, None)
    if record is None or record.tape is not tape:
        record = tape.record_of(argument)
    if record.tape is None:
        if _is_copied(argument, record, node.func):
            return copy_of(tape, argument)
        if is_local(node.func) and not record.is_brief and not _is_gathered(node.func):
            node.reads = (*node.reads, storage)
        if not record.is_sharded:
            tape.reads(node, argument)
        return tape.keep(argument)
    if not argument.requires_grad:  # a write could give it a graph, which would then hold itself by this handle
        argument = argument.detach()
    theirs = None if record.node is None else record.node()
    handle: Handle | None = None
    if theirs is None or is_near(tape, theirs):
        handle = tape.ticket(record, storage, argument)
    if handle is None:
        record.dependents = added(record.dependents, weakref.ref(node))
        if tape.ledger is not None:
            tape.note(argument, record)
        handle = tape.hold(record, storage, argument)
    if type(handle) is Ticket:
        node.builds_on(handle.node)
    return handle


def anchor(tape: Any, x: Tensor, depth: int, block: int) -> None:
    """What a block is given must not build on blocks too far back, ``depth`` functions deep: keep a tensor between."""
    record = tape.record_of(x)
    if record is None or (record.node is None and record.func is None):
        return
    if not record.is_of(x) or record.costs_nothing():
        return
    node = None if record.node is None else record.node()
    if node is not None:
        is_whole = x.stride() == node.stride and x.numel() * x.itemsize == node.nbytes
        is_far = block - node.first > SPAN or not node.is_there()
        if is_far and is_whole and node.fixed is None:
            tape.note(x, record)
            handle = tape.keep(x)
            node.fix(handle)
            node.first, record.is_kept = tape.block, True
            record.handles = added(record.handles, weakref.ref(handle))
    elif record.func is not None and depth:
        for argument, _ in record.seen:
            anchor(tape, argument, depth - 1, block)


def gather(tape: Any, x: Tensor, found: set[Record]) -> None:
    """Add to ``found`` the record of ``x``, and those of all that it was made from."""
    tensors = [x]
    while tensors:
        record = tape.record_of(tensors.pop())
        if record is None or record.tape is None or record.is_weak or record.func is None or record in found:
            continue
        found.add(record)
        for argument, _ in record.seen:
            tensors.append(argument)
            known = tape.record_of(argument) if argument.dim() <= 1 else None
            if known is not None and known.tape is None and known is not BUFFER and not known.is_brief:
                copy_of(tape, argument)  # while it is there


def is_near(tape: Any, node: Node) -> bool:
    """Whether what is asked for now may build on ``node``."""
    return tape.block - node.first <= SPAN and node.depth < MOST_DEPTH and node.is_there()


def _is_copied(x: Tensor, record: Record, func: Any) -> bool:
    """Whether a node of ``func`` holds a copy of a parameter or buffer ``x``, and not the thing itself."""
    is_gone = record.is_brief and isinstance(func, LinearAgain) and not _is_gathered(func)
    return x.dim() <= 1 or is_gone or may_change(x, record, func)


def _is_gathered(func: Any) -> bool:
    """Whether ``func`` has a sharding engine bring back the parameters that it reads."""
    return isinstance(func, LinearAgain) and bool(func.gathers)


def copy_brief(tape: Any, func: Any, seen: Iterable[tuple[Tensor, int]]) -> None:
    """Copy what a call reads of parameters that are there only while their own module runs, which is now."""
    for x, _ in seen:
        if x.dim() <= 1 or isinstance(func, LinearAgain):
            record = tape.record_of(x)
            if record.is_brief and _is_copied(x, record, func):
                copy_of(tape, x)


def may_change(x: Tensor, record: Record, func: Any) -> bool:
    """Whether a parameter or buffer may be another in backward though no version tells: by ``.data``, FSDP2 or EMA."""
    if record is BUFFER:
        return x.is_floating_point() and not is_local(func)  # whole numbers are not updated: weights in 4 bits, say
    return record.tape is None and func not in CASTS and not is_local(func)


def is_local(func: Any) -> bool:
    """Whether ``func`` reads a parameter that its own module's backward needs: a product, or dequantizing."""
    return func is F.linear or isinstance(func, (OpOverload, LinearAgain))
