"""Regenerate the tables that need no GPU, and compare each committed figure with the fresh one.

    make evidence ARGS="--data-root FOLDER"    # all, many hours
    make evidence ARGS="--only known-models fuzz"

FOLDER has official GLUE folders under glue/; what needs it is left out without it, which is said. Fresh tables go to
--out, and committed ones stay as they are: copy what you mean to commit. Times are not compared, as no other machine
has to repeat them. The exit status is 1 if another figure is out of its bound, a row is missing on either side, or a
script fails.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scripts" / "results"
Bound = tuple[float, float] | None
#: Column -> how far a figure may be from the committed one: a part of that, and units of it; None: as it may. The first
#: pattern that fits counts, and those of a table come before these: times are the machine's, the rest is counted.
BOUNDS: dict[str, Bound] = {"*time*": None, "*ms": None, "*s/step": None, "*": (0.01, 0.02)}
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


class Evidence(NamedTuple):
    """A script of scripts/, and how its table is compared with the committed one.

    ``command`` has {out} for the folder that it writes to, and {glue} for given data. ``names`` counts the first
    columns, which name a row; ``bounds`` are of other columns.
    """

    command: str
    names: int = 1
    bounds: Mapping[str, Bound] = {}


#: Training takes another path on other kernels: of means over seeds, some four standard errors of the widest task.
_METRICS: dict[str, Bound] = {"difference": None, "*loss*": (0.0, 0.1), "dev metric": (0.0, 0.07)}
_ERRORS: dict[str, Bound] = {"*": (0.1, 1e-9)}
#: By name of the table; "fuzz" has none here, and its exit status alone counts.
EVIDENCE = {
    "approximate-steps": Evidence(
        "bench/approximate_steps.py --out {out}", 2, {"from float64": (0.1, 1e-7), "spread": (0.25, 0.0), **_ERRORS}
    ),
    "beside": Evidence("bench/beside.py --out {out}", 2),
    "engines": Evidence("bench/engines.py --out {out}", 2),
    "estimate-records": Evidence("bench/estimate_records.py --out {out}", 1, {"difference": (0.0, 0.1)}),
    "fine-tuning": Evidence("bench/fine_tuning.py --glue {glue} --cache {out} --out {out}", 1, _METRICS),
    "fuzz": Evidence("fuzz.py --seeds 0:2000 --jobs 2 --out {out}"),
    "host-time": Evidence("bench/host_time.py --seconds 12 --out {out}", 3, {"*": None}),
    "inverse-derivatives": Evidence("bench/inverse_errors.py --out {out}", 1, _ERRORS),
    "known-models": Evidence("bench/known_models.py --out {out}"),
    "launches": Evidence("bench/launches.py --out {out}", 2),
    "long-context": Evidence("bench/long_context.py --out {out}", 3),
    "longest": Evidence("bench/long_context.py --longest --out {out}"),
    "papers": Evidence("bench/papers.py --out {out}", 4),
    "step-profile": Evidence("bench/step_profile.py --out {out}", 1, {"*": None}),
    "sweep-models": Evidence("bench/sweep_models.py --out {out}"),
    "tiles": Evidence("bench/tiles.py --out {out}", 1, {"float64*": None, "from*": (0.1, 0.05), "whole": None}),
    "techniques": Evidence("bench/techniques.py --out {out}"),
    "ways-to-keep-less": Evidence("bench/ways_to_keep_less.py --out {out}", 2),
    "wta-crs-memory": Evidence("bench/wta_crs.py --out {out}", 3),
}
#: Of these no figure is compared.
TIMES_ALONE = ("fuzz", "host-time", "step-profile")


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is chosen, and report; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=EVIDENCE, default=[*EVIDENCE], metavar="NAME")
    parser.add_argument("--data-root", type=Path, metavar="FOLDER", help="with glue/")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "evidence", metavar="DIR")
    options = parser.parse_args(argv)
    wrong = []
    for name in options.only:
        one, out = EVIDENCE[name], options.out.resolve() / name
        if options.data_root is None and "{glue}" in one.command:
            print(f"{name}: left out, since it needs --data-root")
            continue
        found = run(one, out, (options.data_root or Path()).resolve())
        committed, fresh = RESULTS / f"{name}.md", out / f"{name}.md"
        if not found and name not in TIMES_ALONE:
            found = differences(committed.read_text(encoding="utf-8"), fresh.read_text(encoding="utf-8"), one)
        print("\n  ".join([f"{name}: {len(found)} differences", *found]), flush=True)
        wrong += [name] * bool(found)
    if wrong:
        print(f"Not as committed: {', '.join(wrong)}.")
    return int(bool(wrong))


def run(one: Evidence, out: Path, data: Path) -> list[str]:
    """Run the script, its output into ``out``; what went wrong, if anything did."""
    out.mkdir(parents=True, exist_ok=True)
    folders = {"out": str(out), "glue": str(data / "glue")}
    script, *arguments = (text.format(**folders) for text in shlex.split(one.command))
    with (out / "log.txt").open("w", encoding="utf-8") as log:
        command = [sys.executable, str(ROOT / "scripts" / script), *arguments]
        status = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False).returncode
    return [f"{script} ended with status {status}; see {out / 'log.txt'}"] * bool(status)


def differences(committed: str, measured: str, one: Evidence) -> list[str]:
    """A line for each figure or word that differs between the tables of two Markdown texts, and each missing row."""
    old, new = cells(committed, one), cells(measured, one)
    found = [f"{', '.join(key)}: not in the committed table" for key in new.keys() - old.keys()]
    found += [f"{', '.join(key)}: committed, but not measured" for key in old.keys() - new.keys()]
    both = new.keys() & old.keys()
    apart = [key for key in both if not agree(old[key], new[key], bound_of(key, one))]
    found += [f"{', '.join(key)}: committed {old[key]}, measured {new[key]}" for key in apart]
    return sorted(found) if both else [*found, "no figure was compared"]


def cells(text: str, one: Evidence) -> dict[tuple[str, ...], str]:
    """The cells that are compared, by their table's number, the row's name and how often it stood there, and column."""
    found: dict[tuple[str, ...], str] = {}
    for number, part in enumerate(re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)):
        header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines()]
        for row in rows:
            for column, cell in zip(header[one.names :], row[one.names :], strict=True):
                key = (f"table {number + 1}", *row[: one.names], column)
                while key in found:
                    key = (*key, "again")
                if bound_of(key, one) is not None:
                    found[key] = cell
    return found


def bound_of(key: tuple[str, ...], one: Evidence) -> Bound:
    """Of the cell of that key."""
    column = key[1 + one.names]
    return next(bound for pattern, bound in (*one.bounds.items(), *BOUNDS.items()) if fnmatchcase(column, pattern))


def agree(committed: str, measured: str, bound: Bound) -> bool:
    """Whether two cells have equal words, and numbers within the bound."""
    relative, absolute = bound or (math.inf, math.inf)
    if _NUMBER.sub("#", committed) != _NUMBER.sub("#", measured):
        return False
    numbers = ([float(text.replace(",", "")) for text in _NUMBER.findall(cell)] for cell in (committed, measured))
    return all(abs(b - a) <= absolute + relative * abs(a) + 1e-9 * abs(a) for a, b in zip(*numbers, strict=True))


if __name__ == "__main__":
    sys.exit(main())
