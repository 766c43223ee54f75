"""What a tape has decided: a model does the same at every step, so nothing is asked twice.

Two things are remembered in :attr:`Tape.decided <hf_memsave.tape.Tape>`: of a question, by all that has happened in the
forward until then, whether it pays to remake the tensor; and of a call, whether it was ever asked how its result was
made.
"""

from __future__ import annotations

import sys
from typing import Any

from hf_memsave.tape.prices import is_available, price
from hf_memsave.tape.record import MARK, Record

#: Of a question: it pays; it does not; nor does a sweep find all that it was made from; it does not, but costs no more.
YES, NO, NEVER, EVEN = 1, 2, 3, 7
#: Of a call: it was asked how its result was made; it was not in one forward; nor in the next.
ASKED, ONCE, UNASKED = 4, 5, 6
#: How many forwards that differ, and how many decisions, each of two generations remembers.
MOST_FORWARDS, MOST_DECIDED = 64, 2**15


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


def pays(tape: Any, record: Record, nbytes: int) -> bool:
    """Whether remaking the record's tensor keeps less than ``nbytes``.

    A model does the same at every step, and a decision is about bytes alone. So it is made once, and found again by all
    that has happened in the forward until then.

    Returns:
        Whether to remake it.
    """
    record.key = key = hash((tape.asks(nbytes), record.made))  # a tiny question leaves the next one its number
    decision = tape.decided[key]
    if decision is None:
        found = price(tape, record)
        cost = sys.maxsize if found is None else sum(found[0].values())
        tape.decided[key] = YES if cost < nbytes else EVEN if cost == nbytes else NO
        tape.has_decided = True
        return cost < nbytes
    if decision != YES:
        return False
    for x, version in record.seen:  # it was not written to, nor, if it is a parameter, freed
        theirs = getattr(x.untyped_storage(), MARK, None)
        if theirs is None or theirs.tape is not tape:
            theirs = tape.record_of(x)
        if x._version != version or theirs.is_distrusted:
            return False
        if theirs.tape is None and not is_available(tape, x, theirs, record.func):
            return False
    return True


def learn(tape: Any) -> None:
    """After a forward that took no new decision: a record that was not asked, twice, is not made in the next ones.

    Not under a foreign hook: a checkpointed block that runs again must ask for the same tensors as it did at first,
    whatever was learned in between.
    """
    if not (tape.has_decided or tape.outer is not None or len(tape.made) > MOST_DECIDED):
        for made in tape.made:
            known = tape.decided[made]
            if made in tape.asked:
                tape.decided[made] = ASKED
            elif known != ASKED:
                tape.decided[made] = ONCE if known is None else UNASKED
    tape.made, tape.asked = [], set()  # storages that live on know the tape
    tape.decided.end_forward()
