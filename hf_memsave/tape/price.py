"""What it costs to have a tensor in backward, and what has been decided about it.

A :class:`Price` is a number of new bytes and of functions to run: each tensor that one was made from is kept already,
or remade in turn, or kept now, whichever is less. A :class:`Plan` remembers what was decided, for a model does the same
at every step: of a question, by all that has happened in the forward until then, whether it pays to remake the tensor;
and of a call, whether it was ever asked how its result was made. It is a cache: without it the same bytes are kept.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hf_memsave.tape.again import LinearAgain
from hf_memsave.tape.content import BUFFER, Content
from hf_memsave.tape.private import OpOverload
from hf_memsave.tape.store import Store

#: How many calls may be looked at for each other, and how many may nest in a content that is built on. Remaking a
#: tensor then nests twice as many at most, five of Python's frames each, of which there are 1000.
MOST_DEPTH = 64
#: How many blocks back a tensor may be remade from. A chain through all of them (an fp32 residual sum, remade from the
#: sum before it) would cost a step's time, and its peak.
SPAN = 2
#: Bytes that are not worth a question.
TINY = 64
#: Conversions: what a parameter is converted to, its own module needs, so the parameter is there in backward.
CASTS = frozenset({Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double})
#: Of a question: it pays; it does not; nor does a sweep find all that it was made from; it does not, but costs no more.
YES, NO, NEVER, EVEN = 1, 2, 3, 7
#: Of a call: it was asked how its result was made; it was not in one forward; nor in the next.
ASKED, ONCE, UNASKED = 4, 5, 6
#: How many forwards that differ, and how many decisions, each of two generations remembers.
MOST_FORWARDS, MOST_DECIDED = 64, 2**15

New = dict[int, int]


class Price:
    """One question: what having contents newly keeps (address of a storage -> bytes), and how many functions run."""

    def __init__(self, store: Store) -> None:
        self.store, self.left, self.depth = store, 4 * store.most_work, 0
        self.too_dear: set[int] = set()
        self.looked_at: list[int] = []  # the calls that the answer depends on

    def of_call(self, content: Content, known: Collection[int] = (), most: int | None = None) -> tuple[New, int] | None:
        """Of remaking it by ``most`` functions, where ``known`` storages are there anyway; None if it cannot be."""
        most = self.store.most_work if most is None else most
        self.left -= 1
        new: New = {}
        work = 1
        for x, version in content.seen:
            if x._version != version or work > most or self.left < 0:
                return None
            theirs = self.store.content_of(x)
            if theirs.is_unversioned:
                return None
            storage = x.untyped_storage()
            if id(storage) in new or id(storage) in known or theirs.is_kept:
                continue
            inner, more = self.of(x, theirs, (*known, *new) if new else known, content.func, most - work)
            new.update(inner)
            work += more
        return (new, work) if work <= most else None

    def of(
        self, x: Tensor, content: Content, known: Collection[int] = (), func: Any = None, most: int | None = None
    ) -> tuple[New, int]:
        """Of having ``x`` as an argument of ``func``."""
        storage = x.untyped_storage()
        if content.owner is None:
            return self._of_parameter(x, content, func), 0
        if content.is_kept:
            return {}, 0
        if content.make is not None:
            if content.is_of(x) and is_near(self.store, content):
                return {}, content.work
        elif content.seen is not None and id(storage) not in self.too_dear and content.is_of(x):
            self.looked_at.append(content.made)
            self.depth += 1
            found = self.of_call(content, known, most) if self.depth < MOST_DEPTH else None
            self.depth -= 1
            if found is not None and sum(found[0].values()) < storage.nbytes():
                found[0][id(storage)] = 0  # who else needs it, finds it there
                return found
            self.too_dear.add(id(storage))
        return {id(storage): max(0, storage.nbytes() - content.nbytes_let_go(x._version))}, 0

    def _of_parameter(self, x: Tensor, content: Content, func: Any) -> New:
        """Nothing, or a copy's bytes; without a copy it cannot be had where a sharding engine takes it away."""
        key = id(x.untyped_storage())
        if not is_available(self.store, x, content, func):
            return {key: sys.maxsize}
        return {key: x.numel() * x.itemsize} if is_copied(x, content, func) and not content.is_brief else {}


class Decisions(dict[int, int]):
    """What the forwards of one module have decided and learned, but for those that differ from all of the last.

    What is found among the earlier ones moves to the later ones. Those become the earlier ones when there are enough,
    and only where a forward ends, so that what belongs to one is forgotten together: a batch of another length asks
    all its questions under other numbers.
    """

    def __init__(self) -> None:
        self.earlier: dict[int, int] = {}
        self.forwards = self.known = 0

    def __missing__(self, key: int) -> int | None:
        found = self.earlier.get(key)
        if found is not None:
            self[key] = found
        return found

    def end_forward(self) -> None:
        """Count a forward that brought anything, and forget the earlier ones if these are enough."""
        self.forwards += len(self) > self.known
        if self.forwards >= MOST_FORWARDS or len(self) >= MOST_DECIDED:
            self.earlier, self.forwards = dict(self), 0
            self.clear()
        self.known = len(self)


class Plan:
    """One forward's way through the decisions of its module: a call or question is known by all that came before."""

    def __init__(self, decided: Decisions) -> None:
        self.decided = decided
        self.state = self.calls = 0
        self.made: list[int] = []  # the numbers of all calls that were noted
        self.asked: set[int] = set()  # those of which it was asked how their tensor was made
        self.is_new = False  # something was decided that no earlier forward had decided

    def question_key(self, nbytes: int) -> int:
        """The next question, whether to keep so much; tiny ones leave the next one their number."""
        key = hash((self.state, self.calls, nbytes))
        if nbytes > TINY:
            self.state = key
        return key

    def decide_remake(self, store: Store, content: Content, nbytes: int) -> bool:
        """Whether remaking ``content`` keeps less than ``nbytes``: decided once, and found again."""
        key = hash((self.state, self.calls, nbytes))
        if nbytes > TINY:
            self.state = key
        content.key = key = hash((key, content.made))
        decision = self.decided[key]
        if decision is None:
            price = Price(store)
            found = price.of_call(content)
            cost = sys.maxsize if found is None else sum(found[0].values())
            self.asked.update(price.looked_at)
            self.learn(key, YES if cost < nbytes else EVEN if cost == nbytes else NO)
            return cost < nbytes
        return decision == YES and _is_as_it_was(store, content)

    def learn(self, key: int, decision: int) -> None:
        """Decide, or decide otherwise, for the next forwards."""
        self.decided[key], self.is_new = decision, True

    def close(self, is_foreign: bool) -> None:
        """After a forward that decided nothing new: a call that was not asked, twice, is not noted in the next ones."""
        # Under a foreign hook it is: a checkpointed block that runs again must ask for the same tensors as at first.
        if not (self.is_new or is_foreign or len(self.made) > MOST_DECIDED):
            for made in self.made:
                known = self.decided[made]
                if made in self.asked:
                    self.decided[made] = ASKED
                elif known != ASKED:
                    self.decided[made] = ONCE if known is None else UNASKED
        self.made, self.asked = [], set()
        self.decided.end_forward()


def _is_as_it_was(store: Store, content: Content) -> bool:
    """Whether what it was made from was not written to, nor, if it is a parameter, freed."""
    for x, version in content.seen:
        if x._version != version or (theirs := store.content_on(x.untyped_storage(), x)).is_unversioned:
            return False
        if theirs.owner is None and not is_available(store, x, theirs, content.func):
            return False
    return True


def is_near(store: Store, content: Content) -> bool:
    """Whether what is asked for now may build on ``content``."""
    return store.block - content.first <= SPAN and content.depth < MOST_DEPTH and content.is_there()


def is_available(store: Store, x: Tensor, content: Content, func: Any) -> bool:
    """Whether what ``func`` makes will have a parameter or buffer ``x`` in backward."""
    # Of a brief one the copy alone tells: a block that runs again may find it at other times than its forward did.
    if not content.is_brief and (x.untyped_storage().nbytes() or not x.numel()):
        return True
    if is_copied(x, content, func):
        return store.has_copy(x)
    return content.is_brief or bool(getattr(func, "gathers", ()))


def is_copied(x: Tensor, content: Content, func: Any) -> bool:
    """Whether what ``func`` makes holds a copy of a parameter or buffer ``x``, and not the thing itself."""
    if x.dim() <= 1 or (content.is_brief and isinstance(func, LinearAgain) and not func.gathers):
        return True
    return may_change(x, content, func)


def may_change(x: Tensor, content: Content, func: Any) -> bool:
    """Whether a parameter or buffer may be another in backward though no version tells: by ``.data``, FSDP2 or EMA."""
    if content is BUFFER:
        return x.is_floating_point() and not is_local(func)  # whole numbers are not updated: weights in 4 bits, say
    return content.owner is None and func not in CASTS and not is_local(func)


def is_local(func: Any) -> bool:
    """Whether ``func`` reads a parameter that its own module's backward needs: a product, or dequantizing."""
    return func is F.linear or isinstance(func, (OpOverload, LinearAgain))
