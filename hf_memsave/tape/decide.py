"""The price of having a tensor in backward: new bytes, and functions to run. It is computed each time it is asked.

Each argument of the call that made it is kept already, or recomputed in turn, or kept now, whichever is less.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from torch import Tensor

from hf_memsave.tape.content import Content
from hf_memsave.tape.parameters import is_available, is_copied
from hf_memsave.tape.storage import Storages

#: How many calls may be looked at for each other, and how many may nest in a content that is built on. Recomputing a
#: tensor then nests twice as many at most, five of Python's frames each, of which there are 1000.
MOST_DEPTH = 64
#: How many blocks back a tensor may be recomputed from. A chain through all of them (an fp32 residual sum, recomputed
#: from the sum before it) would cost a step's time, and its peak.
SPAN = 2
#: Bytes that would be kept newly, by the address of their storage.
New = dict[int, int]


class Price:
    """Price contents: bytes that would be kept newly, and functions to run."""

    def __init__(self, storages: Storages) -> None:
        self.storages, self.left, self.depth = storages, 4 * storages.most_work, 0
        self.too_dear: set[int] = set()
        self.looked_at: list[int] = []  # the numbers of the calls that the answer depends on

    def of_call(self, content: Content, known: Collection[int] = (), most: int | None = None) -> tuple[New, int] | None:
        """Price recomputing ``content`` by ``most`` functions, if ``known`` storages are kept; None if it cannot be."""
        most = self.storages.most_work if most is None else most
        self.left -= 1
        new: New = {}
        work = 1
        for x, version in content.call.seen:
            if x._version != version or work > most or self.left < 0:
                return None
            storage = x.untyped_storage()
            theirs = self.storages.content_on(storage, x)
            if theirs.is_unversioned:
                return None
            if id(storage) in new or id(storage) in known or theirs.is_kept:
                continue
            inner, more = self.of(x, theirs, (*known, *new) if new else known, content.call.func, most - work)
            new.update(inner)
            work += more
        return (new, work) if work <= most else None

    def of(
        self, x: Tensor, content: Content, known: Collection[int] = (), func: Any = None, most: int | None = None
    ) -> tuple[New, int]:
        """Price having ``x``, whose content this is, as an argument of ``func``: kept or recomputed."""
        storage = x.untyped_storage()
        if content.owner is None:
            return self._of_parameter(x, content, func), 0
        if content.is_kept:
            return {}, 0
        if content.make is not None:
            if content.is_of(x) and is_near(self.storages, content):
                return {}, content.work
        elif content.call is not None and id(storage) not in self.too_dear and content.is_of(x):
            self.looked_at.append(content.call.number)
            self.depth += 1
            found = self.of_call(content, known, most) if self.depth < MOST_DEPTH else None
            self.depth -= 1
            if found is not None and sum(found[0].values()) < storage.nbytes():
                found[0][id(storage)] = 0  # who else needs it, finds it there
                return found
            self.too_dear.add(id(storage))
        has_others = content.parts or content.recomputable
        freed = content.freed_by_keeping(x._version, self.looked_at) if has_others else 0
        return {id(storage): max(0, storage.nbytes() - freed)}, 0

    def _of_parameter(self, x: Tensor, content: Content, func: Any) -> New:
        """Price a parameter: nothing, or its copy's bytes; no price will do where an engine takes it away uncopied."""
        key = id(x.untyped_storage())
        if not is_available(self.storages, x, content, func):
            return {key: sys.maxsize}
        return {key: x.numel() * x.itemsize} if is_copied(x, content, func) and not content.is_per_module else {}


def is_near(storages: Storages, content: Content) -> bool:
    """Return whether ``content`` may be built on now: it is near, not too deep, and reads no freed parameter."""
    return storages.block - content.first <= SPAN and content.depth < MOST_DEPTH and content.is_there()


def is_cheaper(storages: Storages, content: Content, nbytes: int) -> bool:
    """Return whether recomputing ``content`` keeps less than ``nbytes``."""
    price = Price(storages)
    found = price.of_call(content)
    if found is None or sum(found[0].values()) >= nbytes:
        return False
    storages.calls.used.update(price.looked_at, (content.call.number,))
    return True


def cost(storages: Storages, tensor: Tensor) -> int:
    """Return the bytes that having ``tensor`` in backward would add; the calls that decide it stay recorded."""
    if (content := storages.content_of(tensor)) is None:
        return tensor.numel() * tensor.itemsize
    price = Price(storages)
    new, _ = price.of(tensor, content)
    storages.calls.used.update(price.looked_at)
    return sum(new.values())
