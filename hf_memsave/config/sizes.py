"""Read sizes in bytes as users write them, and format them for users, in tables too."""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Iterable

from hf_memsave.errors import PlanError

MIB, GIB = 2**20, 2**30
#: Unit -> a power: of 1000 before a B alone ("24GB"); else ("24GiB", and as for SLURM "24G") of 1024.
_UNITS = {"K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(?:([KMGT])(I?B?))?", re.IGNORECASE | re.ASCII)


def bytes_of(size: int | str, name: str = "memory") -> int:
    """Return bytes given as such or as a text; PlanError, which calls the size ``name``, for anything else."""
    count = 0
    if isinstance(size, int) and not isinstance(size, bool):
        count = size
    elif isinstance(size, str) and (found := _SIZE.fullmatch(size.strip())):
        number, unit, kind = found.groups()
        each = (1000 if kind.upper() == "B" else 1024) ** _UNITS[unit.upper()] if unit else 1
        count = int(min(float(number) * each, sys.maxsize))
        count = count if unit or count >= MIB else 0  # so few bytes are a number that lacks its unit
    if count > 0:
        return count
    raise PlanError(
        f"{name}: expected bytes, or a text such as '16GiB' (16 x 2^30 bytes, as is '16G') or '16GB' (16 x 10^9), more "
        f"than 0, got {size!r}. Write it with a unit: KiB, MiB, GiB, TiB, KB, MB, GB, TB, K, M, G or T."
    )


def gib(count: float) -> str:
    """Format bytes for reading: "22.35 GiB", or less in MiB, KiB or bytes."""
    size, unit = next((u for u in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")) if count >= u[0]), (1, "bytes"))
    return f"{count / size:,.{2 * (size > 1)}f} {unit}"


def both(count: float) -> str:
    """Format bytes in binary and decimal units: "22.35 GiB (24.0 GB)"."""
    return f"{gib(count)} ({count / 1e9:,.1f} GB)" if count >= GIB else f"{gib(count)} ({count / 1e6:,.1f} MB)"


def counted(number: int | str, noun: str) -> str:
    """Format a number, or the text for one, with its noun: "1 model", "6 + 6 layers"."""
    return f"{number if isinstance(number, str) else f'{number:,}'} {noun}{'' if str(number) == '1' else 's'}"


def html_table(title: str, rows: Iterable[Iterable[str]], remarks: Iterable[str] = ()) -> str:
    """Return a table for a notebook in HTML: a title, a row of headings, rows, and remarks below."""
    head, *rest = [[html.escape(cell.strip()) for cell in row] for row in rows]
    cells = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
    cells += [f"<tr><th>{name}</th>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for name, *row in rest]
    notes = "".join(f"<p>{html.escape(remark)}</p>" for remark in remarks)
    table = f"<table>{''.join(cells)}</table>"
    return f'<p><b>{html.escape(title)}</b></p><div style="overflow-x:auto">{table}</div>{notes}'
