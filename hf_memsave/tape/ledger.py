"""What a tape was asked to keep in one forward, and how it answered: by function, once the forward is over."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, NamedTuple

from hf_memsave.tape.record import Record


class _Asked(NamedTuple):
    """A storage that autograd asked to keep, or that is kept to remake others."""

    record: weakref.ref[Record]
    nbytes: int
    made_by: str
    is_source: bool


class Ledger:
    """Counts storages once each, by what became of them when the forward had ended.

    Attributes:
        avoided: Bytes that autograd asked to keep and does not, by the function that made them; below zero for what is
            kept instead.
        is_loss_chunked: Logits were not computed at once.
        kept: Bytes that are kept, for an operation of the model or to remake others, by what made them.
    """

    def __init__(self) -> None:
        self.avoided: Counter[str] = Counter()
        self.kept: Counter[str] = Counter()
        self.is_loss_chunked = False
        self._asked: dict[int, _Asked] = {}
        self._small: list[tuple[weakref.ref[Any], int, str]] = []

    def note(self, record: Record, storage: Any, tensor: Any, is_source: bool = False) -> None:
        """Autograd asked for ``tensor``, or another one is to be remade from it."""
        if record.number is None:
            record.number = len(self._asked)
            self._asked[record.number] = _Asked(weakref.ref(record), storage.nbytes(), _maker(tensor), is_source)
        elif not is_source and record.number in self._asked:
            self._asked[record.number] = self._asked[record.number]._replace(is_source=False)

    def note_small(self, handle: Any, nbytes: int, name: str) -> None:
        """``handle`` keeps this much instead of a tensor."""
        self._small.append((weakref.ref(handle), nbytes, name))

    def forget(self) -> None:
        """The forward failed: count another one."""
        self._asked, self._small = {}, []

    def close(self) -> None:
        """The forward is over: count."""
        for record_of, nbytes, made_by, is_source in self._asked.values():
            record = record_of()
            if record is not None and record.costs_nothing():
                self.kept[made_by] += nbytes
                self.avoided[made_by] -= nbytes if is_source else 0
            elif not is_source:
                self.avoided[made_by] += nbytes
        for handle_of, nbytes, name in self._small:
            handle = handle_of()
            if handle is not None and getattr(handle, "via", None) is None:
                self.kept[name] += nbytes
                self.avoided[name] -= nbytes
        self._asked, self._small = {}, []

    @property
    def nbytes_avoided(self) -> int:
        """What stock would have kept beyond what is kept now."""
        return max(0, sum(self.avoided.values()))

    @property
    def nbytes_kept(self) -> int:
        """What is kept, for the model's operations or for remaking."""
        return sum(self.kept.values())

    def by_function(self, what: str) -> dict[str, int]:
        """Bytes of ``what`` ("avoided" or "kept") by function, the most first."""
        return dict((+(self.avoided if what == "avoided" else self.kept)).most_common())


def _maker(tensor: Any) -> str:
    """The operation that made it, by its autograd node."""
    return "no gradient" if tensor.grad_fn is None else tensor.grad_fn.name().removesuffix("Backward0").lower()
