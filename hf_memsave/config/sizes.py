"""Bytes, as users write them and as they read them."""

from __future__ import annotations

import re
import sys

from hf_memsave.errors import PlanError

MIB, GIB = 2**20, 2**30
_UNITS = {"K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([KMGT])(I?)B", re.IGNORECASE)


def bytes_of(size: int | str, name: str = "memory") -> int:
    """Returns bytes given as such or as a text, "16GiB" or "800MB"; an error calls them ``name``.

    Raises:
        PlanError: It is neither, or not more than 0.
    """
    count = 0
    if isinstance(size, int) and not isinstance(size, bool):
        count = size
    elif isinstance(size, str) and (found := _SIZE.fullmatch(size.strip())):
        number, unit, binary = found.groups()
        count = int(min(float(number) * (1024 if binary else 1000) ** _UNITS[unit.upper()], sys.maxsize))
    if count > 0:
        return count
    raise PlanError(
        f"{name}: expected bytes, or a text such as '16GiB' or '800MB', more than 0, got {size!r}. Write it with a "
        "unit: KiB, MiB, GiB, TiB, KB, MB, GB or TB."
    )


def gib(count: float) -> str:
    """Bytes, to be read."""
    return f"{count / GIB:,.2f} GiB" if count >= GIB else f"{count / MIB:,.2f} MiB"
