"""Put what ``gpu_check.sh`` has measured beside what is estimated: README's first table, and "On a GPU" in numbers.

    python scripts/bench/gpu_tables.py [gpu-check.tgz]

The archive's tables go to scripts/results. Without one, both tables are written again from what is there.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from known_models import COLUMNS, EIGHT, MODELS
from publish import RESULTS, ROOT, arguments, table

GIB = 2**30
#: README has not the loss alone, nor offload.
SHOWN = list(COLUMNS)[:5]
#: What a run of ``gpu_check.sh`` leaves.
TABLES = ("gpu-bits", "gpu-models", "gpu-ops")
BEGIN, END = "<!-- written by scripts/bench/gpu_tables.py -->\n", "<!-- until here -->\n"


def unpack(archive: Path, into: Path) -> None:
    """Take the tables, and nothing else, out of an archive."""
    with tarfile.open(archive) as packed:
        for member in packed.getmembers():
            name = Path(member.name)
            if name.stem in TABLES and name.suffix in (".json", ".md") and (file := packed.extractfile(member)):
                (into / name.name).write_bytes(file.read())


def results(folder: Path, name: str) -> dict[str, Any]:
    """The figures of a table; none where it was not measured."""
    file = folder / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def readme(folder: Path) -> str:
    """README's first table: estimates, and the peak measured with ``memsave=True``."""
    known, measured = results(folder, "known-models"), results(folder, "gpu-models")
    rows = []
    for name in (name for name in MODELS if name != EIGHT):
        peaks = [known[name][method]["peak"] for method in SHOWN] + [measured.get(f"{name}: memsave", {}).get("peak")]
        rows.append([re.sub(", (bf16|autocast)", "", name), *(f"{peak / GIB:.1f}" if peak else "" for peak in peaks)])
    where = "`memsave=True`, [measured](docs/numbers.md#on-a-gpu)"
    return table(["model", *(COLUMNS[method] for method in SHOWN), where], rows)


def numbers(folder: Path) -> str:
    """The section of docs/numbers.md."""
    if not (measured := results(folder, "gpu-models")):
        return "Not measured yet.\n"
    about = measured.pop("about")
    said = f"GiB and ms, on {about['machine']}; `{about['command']}`, {about['commit']}, {about['date']}."
    header = ["model", "method", "peak, estimated", "measured", "kept, estimated", "measured", "step, ms", "host, ms"]
    parts = [said, table(header, map(row, measured, measured.values()))]
    if bits := results(folder, "gpu-bits"):
        parts.append(f"Steps beside stock's: {len(bits['rows'])} rows, {bits['wrong']} of them wrong.\n")
    ops = results(folder, "gpu-ops")
    if machine := ops.pop("machine", None):
        (_, moved, _, bandwidth, *_), (_, product, *_) = machine
        parts.append(f"A copy {moved}: {bandwidth} GB/s. A product {product}.\n")
    ops = [rows for shape, rows in ops.items() if shape != "about"]
    if shares := [float(row[4]) for rows in ops for row in rows[1:] if row[4]]:
        parts.append(f"Kernels, of a copy's bandwidth: {min(shares):.0%} to {max(shares):.0%}.\n")
    links = ", ".join(f"[{page.stem}](../scripts/results/{page.name})" for page in sorted(folder.glob("gpu-*.md")))
    return "\n".join([*parts, f"Tables: {links}.\n"])


def row(key: str, found: dict[str, Any]) -> list[str]:
    """Of that section's table; a row that was not measured says why."""
    expected = found.get("expected", {})
    sizes = [source.get(what) for what in ("peak", "kept") for source in (expected, found)]
    times = [f"{1e3 * found[what]:.1f}" if what in found else "" for what in ("seconds", "host_seconds")]
    name, method = key.rsplit(": ", 1)
    method += f" ({found['verdict']})" if found["verdict"] else ""
    return [name, method, *(f"{size / GIB:.2f}" if size else "" for size in sizes), *times]


def with_table(text: str, header: str, new: str) -> str:
    """A page, its table that begins with ``header`` replaced."""
    found, count = re.subn(rf"(?m)^{re.escape(header)}.*\n(?:\|.*\n)+", lambda _: new, text)
    if count != 1:
        raise SystemExit(f"expected one table that begins with {header!r}, got {count}")
    return found


def pages(folder: Path, root: Path) -> Iterable[tuple[Path, str]]:
    """Each page that has these tables, as it should be."""
    page = root / "README.md"
    yield page, with_table(page.read_text(encoding="utf-8"), "| model | stock | `memsave=True` |", readme(folder))
    page = root / "docs" / "numbers.md"
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    yield page, f"{before}{BEGIN}\n{numbers(folder)}\n{END}{rest.split(END)[1]}"


def main(argv: Sequence[str] | None = None) -> None:
    """Unpack, and write the pages."""
    parser = arguments(__doc__)
    parser.add_argument("archive", type=Path, nargs="?", help="gpu-check.tgz")
    options = parser.parse_args(argv)
    if options.archive and not options.archive.is_file():
        parser.error(f"expected a file that gpu_check.sh has written, got {options.archive}. Name its gpu-check.tgz.")
    if options.archive:
        unpack(options.archive, RESULTS)
    for page, text in pages(RESULTS, ROOT):
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
