"""The calls of a forward, by numbers: a call that two forwards had no use for leaves no record, as in stock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Forwards that had no use for the record of a call, after which there is none.
UNUSED = 2
#: Signatures of forwards, and calls of all of them, that a module remembers.
MOST_SIGNATURES, MOST_CALLS = 64, 2**16


class Calls:
    """Number the calls of one forward, and remember across forwards which of them are recorded for nothing.

    A call is known by the forward's signature (config, what is trained, sizes of inputs) and by all calls before it,
    their functions and sizes, of which the number of binary digits counts. The forwards of a module share ``seen``:
    signature -> call -> how many of them had no use for it; below zero once one had. It is of use where a tensor is
    recomputed by it, or what is kept depends on it. The first forward of other sizes is recorded whole.
    """

    def __init__(self, seen: dict[int, dict[int, int]], *signature: Any, sizes: Sequence[int] = ()) -> None:
        self.seen, self.sizes = seen, hash(tuple(sizes))  # the latter stands among the calls of which it was seen
        self.state = hash((signature, *[n.bit_length() for n in sizes]))  # the number of the call that was made last
        self.made: list[int] = []  # the numbers of all calls that were recorded
        self.used: set[int] = set()
        known = seen.pop(self.state, None)
        self._learned = seen[self.state] = {} if known is None else known  # the latest stand last
        self.known = self._learned if self.sizes in self._learned else {}

    def end(self) -> None:
        """Learn which calls were of use to the forward that ended; forget the oldest signatures beyond the limits."""
        self._learned[self.sizes] = -1
        for made in self.made:
            times = self._learned.get(made, 0)
            self._learned[made] = -1 if made in self.used or times < 0 else times + 1
        while sum(map(len, list(self.seen.values()))) > MOST_CALLS or len(self.seen) > MOST_SIGNATURES:
            self.seen.pop(next(iter(list(self.seen)), 0), None)  # of threads, any may be first
