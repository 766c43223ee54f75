"""Parameters in autocast's dtype, converted for a whole block at once: many small launches become one.

Which ones a block converts is learned as it runs: the first parameter whose conversion is not there yet begins a group,
and those that come after it in the block join it; next time, all are converted with the first. FSDP2 frees and gathers
the parameters of other blocks as it likes, so a group ends with its block.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_memsave.tape.private import copy_each

#: The bytes of parameters that may be converted at once.
MOST = 2**26


class Low(NamedTuple):
    """A tensor converted to a lower dtype, and the version that it had then."""

    tensor: Tensor
    version: int

    def is_of(self, x: Tensor, dtype: torch.dtype) -> bool:
        """Return whether this is still ``x`` in ``dtype``, as far as versions tell."""
        return self.version == x._version and self.tensor.dtype == dtype and self.tensor.shape == x.shape


class LowParameters:
    """The parameters that one forward, or one backward, has converted."""

    def __init__(self, groups: Any) -> None:
        self._groups = groups  # weakly: the first parameter of each known group -> weak references to the others
        self._block: Any = None
        self._ready: dict[int, Low] = {}
        self._group: list[weakref.ref[Tensor]] = []  # an error in backward leaves this behind

    def low(self, p: Tensor, dtype: torch.dtype, block: Any) -> Tensor:
        """Return the parameter ``p`` in ``dtype``, not to be written to; end the group when ``block`` changes."""
        if block != self._block:
            self.end()
            self._block = block
        known = self._ready.pop(id(p), None)
        if known is not None and known.is_of(p, dtype):
            return known.tensor
        after = [q for q in _alive(self._groups.get(p, ())) if _is_like(q, p)]
        group = _alive(self._group)
        if after or not group or sum(q.nbytes for q in (p, *group)) > MOST:
            self.end()
            self._group = [weakref.ref(q) for q in (p, *after)]
        elif all(q is not p for q in group):
            self._group.append(weakref.ref(p))
        low = [torch.empty_like(q, dtype=dtype) for q in (p, *after)]
        copy_each(low, [p, *after])
        self._ready.update({id(q): Low(made, q._version) for q, made in zip(after, low[1:], strict=True)})
        return low[0]

    def end(self) -> None:
        """End the group, with its block, forward or backward: remember its parameters, except those not needed."""
        if self._group and (first := self._group[0]()) is not None:
            self._groups[first] = [ref for ref in self._group[1:] if id(ref()) not in self._ready]
        self._group = []
        self._ready.clear()


def _alive(refs: Iterable[weakref.ref[Tensor]]) -> list[Tensor]:
    return [p for ref in refs if (p := ref()) is not None]


def _is_like(p: Tensor, first: Tensor) -> bool:
    """Return whether p is still like ``first`` (not moved, sharded or offloaded), and has a storage of its own."""
    is_own = p.untyped_storage().nbytes() == p.nbytes
    return type(p) is type(first) and (p.device, p.dtype) == (first.device, first.dtype) and is_own
