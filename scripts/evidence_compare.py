"""Compare the tables of two Markdown texts, figure by figure, each column within its own bound."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Bound:
    """How far a measured figure may be from the committed one: a part of that, and units of its column.

    ``errors`` is for a cell that gives a figure and its standard error, ``a ± b``: of two such, the figures may be so
    many standard errors of their difference apart, by the committed one. ``factor`` is for another machine: neither may
    be more than so many times the other.
    """

    relative: float = 0.0
    absolute: float = 0.0
    errors: float = 0.0
    factor: float = 1.0

    def holds(self, committed: float, measured: float, error: float = 0.0) -> bool:
        """Whether the two agree, where their difference has this standard error."""
        if self.factor > 1:
            return max(measured, committed) <= self.factor * min(measured, committed)
        most = self.absolute + self.relative * abs(committed) + self.errors * error
        return abs(measured - committed) <= most + 1e-9 * abs(committed)

    def __str__(self) -> str:
        """Such as "within 0.01 of it + 0.01"."""
        parts = [f"{self.relative:.3g} of it"] * bool(self.relative) + [f"{self.absolute:g}"] * bool(self.absolute)
        parts += [f"{self.errors:g} standard errors"] * bool(self.errors)
        parts += [f"a factor of {self.factor:g}"] * (self.factor > 1)
        return f"within {' + '.join(parts)}" if parts else "equal"


#: Figures of the machine (seconds, and counts that follow from them), which no other machine has to repeat.
MACHINE = Bound(relative=float("inf"))

#: Of a row: the header of its table, how many rows of that name there were before, and its name.
Key = tuple[tuple[str, ...], int, tuple[str, ...]]


def tables(text: str, names: int) -> dict[Key, list[str]]:
    """The rows of all tables in Markdown: name, in the first columns, of which there are ``names``, and other cells."""
    found: dict[Key, list[str]] = {}
    seen: Counter[tuple[tuple[str, ...], tuple[str, ...]]] = Counter()
    header: tuple[str, ...] | None = None
    for line in text.splitlines():
        if not line.startswith("|"):
            header = None
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if header is None:
            header = tuple(cells)
        elif set("".join(cells)) - set("-: ") or not any(cells):
            name = tuple(cells[:names])
            found[header, seen[header, name], name] = cells[names:]
            seen[header, name] += 1
    return found


def differences(
    committed: str, measured: str, names: int, bounds: Mapping[str, Bound], *, partly: bool = False
) -> tuple[list[str], int]:
    """A line for each difference between two runs' texts, and how many figures were compared.

    ``bounds`` has patterns of columns' names, of which the first that fits counts; other columns must be equal.
    ``partly`` says that ``measured`` may lack rows.
    """
    old, new = tables(committed, names), tables(measured, names)
    found = [f"{_of(key)}: not in the committed table" for key in new if key not in old]
    if not partly:
        found += [f"{_of(key)}: committed, but not measured" for key in old if key not in new]
    figures = 0
    for key in new.keys() & old.keys():
        for column, before, after in zip(key[0][names:], old[key], new[key], strict=True):
            bound = next((bound for pattern, bound in bounds.items() if fnmatchcase(column, pattern)), Bound())
            if bound is MACHINE:
                continue
            figures += 1
            if not _agree(before, after, bound):
                found.append(f"{_of(key)}: {column}: committed {before}, measured {after}, expected {bound}")
    if not figures:
        found.append("no figure was compared: no table was measured that the committed file has")
    return sorted(found), figures


def _of(key: Key) -> str:
    return ", ".join(key[2])


def _agree(before: str, after: str, bound: Bound) -> bool:
    """Whether two cells have the same words, and numbers that agree."""
    if _NUMBER.sub("#", before) != _NUMBER.sub("#", after):
        return False
    numbers = ([float(text.replace(",", "")) for text in _NUMBER.findall(cell)] for cell in (before, after))
    pairs = list(zip(*numbers, strict=True))
    if bound.errors and "±" in before:
        figures, (error, _) = pairs  # a wrong run may spread more, which must not widen its own bound
        return bound.holds(*figures, math.sqrt(2) * error)
    return all(bound.holds(*pair) for pair in pairs)
