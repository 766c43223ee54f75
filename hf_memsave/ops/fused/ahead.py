"""Parameters in autocast's dtype, converted for a whole block at once: many small launches become one.

What is needed after what is learned as it happens: the first parameter whose conversion is not there yet begins a
group, and those that come after it in the same block join. The next time, all are converted with the first. FSDP2 frees
and gathers the parameters of other blocks as it likes, so a group ends with its block.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hf_memsave.tape.private import copy_each

#: The bytes of parameters that may be converted at once.
MOST = 2**26


class Low(NamedTuple):
    """What a tensor was in a lower dtype when it had this version."""

    tensor: Tensor
    version: int

    def is_of(self, x: Tensor, dtype: torch.dtype) -> bool:
        """Whether ``x`` in ``dtype`` is still that, as far as versions tell."""
        return self.version == x._version and self.tensor.dtype == dtype and self.tensor.shape == x.shape


class Groups:
    """The first parameter of each group -> all that came after it; weakly, as parameters belong to their model."""

    def __init__(self) -> None:
        self._after: Any = WeakIdKeyDictionary()

    def after(self, first: Tensor) -> list[Tensor]:
        """Parameters that came after ``first``, and that can be converted along with it."""
        return [p for p in alive(self._after.get(first, ())) if _is_like(p, first)]

    def learn(self, first: Tensor, after: Iterable[weakref.ref[Tensor]]) -> None:
        """They came after ``first``."""
        self._after[first] = list(after)


def alive(refs: Iterable[weakref.ref[Tensor]]) -> list[Tensor]:
    """The parameters that are still there."""
    return [p for ref in refs if (p := ref()) is not None]


def _is_like(p: Tensor, first: Tensor) -> bool:
    """Not if it has moved, is sharded or offloaded now, or lies in a buffer that others write to."""
    is_own = p.untyped_storage().nbytes() == p.nbytes
    return type(p) is type(first) and (p.device, p.dtype) == (first.device, first.dtype) and is_own


class Ahead:
    """What one forward, or one backward, has converted.

    Args:
        groups: What those before have learned.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._where: Any = None
        self._ready: dict[int, Low] = {}
        self._first: weakref.ref[Tensor] | None = None
        self._group: list[weakref.ref[Tensor]] = []  # an error in backward leaves this behind

    def low(self, p: Tensor, dtype: torch.dtype, where: Any) -> Tensor:
        """The parameter ``p`` in ``dtype``, which is not written to; when ``where`` changes, a group ends."""
        if where != self._where:
            self.end()
            self._where = where
        known = self._ready.pop(id(p), None)
        if known is not None and known.is_of(p, dtype):
            return known.tensor
        after = self._groups.after(p)
        group = alive(self._group)
        if after or self._first is None or sum(q.nbytes for q in (p, *group)) > MOST:
            self.end()
            self._first, self._group = weakref.ref(p), [weakref.ref(q) for q in after]
        elif all(q is not p for q in group):
            self._group.append(weakref.ref(p))
        low = [torch.empty_like(q, dtype=dtype) for q in (p, *after)]
        copy_each(low, [p, *after])
        self._ready.update({id(q): Low(made, q._version) for q, made in zip(after, low[1:], strict=True)})
        return low[0]

    def end(self) -> None:
        """At the end of a block, of a forward or backward: remember the group, but for what was not needed."""
        if self._first is not None and (first := self._first()) is not None:
            self._groups.learn(first, [ref for ref in self._group if id(ref()) not in self._ready])
        self._first, self._group = None, []
        self._ready.clear()
