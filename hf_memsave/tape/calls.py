"""The calls of a forward, by numbers: of those that two forwards had no use for, the next ones keep no record.

So their arguments die as early as in stock, and a forward that has been seen before takes less of the host's time.
"""

from __future__ import annotations

from typing import Any

#: Forwards that had no use for the record of a call, after which there is none.
UNUSED = 2
#: Signatures of forwards, and calls of each, that are remembered.
MOST_SIGNATURES, MOST_CALLS = 64, 2**15


class Calls:
    """Number the calls of one forward, and remember across forwards which of them are recorded for nothing.

    A call is known by the forward's signature (settings, what is trained, sizes of inputs) and by all calls before it,
    their functions and sizes. The forwards of a module share ``seen``: signature -> call -> how many of them had no use
    for it; below zero once one had. It is of use where a tensor is made again by it, or what is kept depends on it.
    """

    def __init__(self, seen: dict[int, dict[int, int]], *signature: Any) -> None:
        self.state = hash(signature)
        self.made: list[int] = []  # the numbers of all calls that were recorded
        self.used: set[int] = set()
        known = seen.pop(self.state, None)
        self.known = seen[self.state] = {} if known is None else known  # the latest stand last
        if len(seen) > MOST_SIGNATURES:
            seen.pop(list(seen)[0], None)

    def next(self, *call: Any) -> int:
        """Return the number of the call that is made now, which ``call`` tells from others."""
        self.state = hash((self.state, call))
        return self.state

    def end(self) -> None:
        """Learn from a forward that has ended."""
        if len(self.known) + len(self.made) > MOST_CALLS:
            self.known.clear()
        for made in self.made[:MOST_CALLS]:
            times = self.known.get(made, 0)
            self.known[made] = -1 if made in self.used or times < 0 else times + 1
