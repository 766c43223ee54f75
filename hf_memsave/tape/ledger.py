"""What tapes were asked to keep in one forward, and how they answered: by function and by block."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hf_memsave.tape.record import Ticket


@dataclass
class Ledger:
    """Storages that autograd asked to keep, each counted once, by address.

    Attributes:
        avoided: Those that are remade instead: bytes, and what remakes them.
        kept: Those that are kept for an operation of the model: bytes, and what made them.
        sources: Those that are kept because others are remade from them: bytes, and what made them.
    """

    avoided: dict[int, tuple[int, str]] = field(default_factory=dict)
    kept: dict[int, tuple[int, str]] = field(default_factory=dict)
    sources: dict[int, tuple[int, str]] = field(default_factory=dict)

    def note(self, storage: Any, tensor: Any, handle: Any) -> None:
        """Autograd asked for ``tensor``, and gets ``handle``; None if it is kept as it is."""
        address, nbytes = storage._cdata, storage.nbytes()
        if isinstance(handle, Ticket):
            self.avoided[address] = nbytes, _name(handle.node.func)
        else:
            self.kept.setdefault(address, (nbytes, _maker(tensor)))

    def note_source(self, storage: Any, tensor: Any) -> None:
        """``tensor`` is kept because something is remade from it."""
        self.sources.setdefault(storage._cdata, (storage.nbytes(), _maker(tensor)))

    @property
    def nbytes_avoided(self) -> int:
        """What stock would have kept beyond what is kept now."""
        for_them = sum(nbytes for address, (nbytes, _) in self.sources.items() if address not in self.kept)
        return sum(nbytes for nbytes, _ in self._avoided().values()) - for_them

    @property
    def nbytes_kept(self) -> int:
        """What is kept, for the model's operations or for remaking."""
        return sum(nbytes for nbytes, _ in (self.sources | self.kept).values())

    def by_function(self, what: str) -> dict[str, int]:
        """Bytes of ``what`` ("avoided" or "kept") by function, the most first."""
        total: Counter[str] = Counter()
        for nbytes, name in (self._avoided() if what == "avoided" else self.sources | self.kept).values():
            total[name] += nbytes
        return dict(total.most_common())

    def _avoided(self) -> dict[int, tuple[int, str]]:
        return {a: entry for a, entry in self.avoided.items() if a not in self.kept and a not in self.sources}


def _name(func: Any) -> str:
    func = getattr(func, "func", func)  # a partial's
    return getattr(func, "__name__", type(func).__name__).strip("_")


def _maker(tensor: Any) -> str:
    """The operation that made it, by its autograd node."""
    return "leaf" if tensor.grad_fn is None else tensor.grad_fn.name().removesuffix("Backward0").lower()
