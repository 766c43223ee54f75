"""Run random programs patched and stock, and compare every tensor, gradient and random number bit for bit.

    python scripts/fuzz.py [--seeds 0:2000] [--jobs 1] [--minutes M] [--taught] [--out DIR]

A seed draws a program: forwards of modules, views, writes, masks, checkpoints, hooks, changed attributes and errors,
and what a user does around them (``tests/support/programs.py``). Where stock raises, the answer is what stock gives
when every tensor that it keeps is a copy. A seed that differs prints the smallest program that was found to differ
still; the exit status is 1 then. Look at one again with ``--seeds N:N+1``.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.differential import check, outlives_in_stock, shrunk
from support.helpers import EARLIER, nodes
from support.programs import draw

#: Seeds that a process takes at once; after them no node of a tape may be alive.
CHUNK = 100


@dataclass
class Found:
    """What some seeds gave."""

    outcomes: Counter[str] = field(default_factory=Counter)
    #: Seed, what differs, and the smallest program.
    differences: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, other: Found) -> None:
        """Add what other seeds gave."""
        self.outcomes += other.outcomes
        self.differences += other.differences


def run(seeds: range, is_taught: bool = False) -> Found:
    """Compare the programs of ``seeds``."""
    found = Found()
    for seed in seeds:
        program = draw(seed)
        try:
            found.outcomes[check(program, is_taught)] += 1
        except AssertionError as error:
            found.outcomes["differs"] += 1
            found.differences.append((seed, str(error).partition("\n")[0], str(shrunk(program))))
        except Exception as error:  # of stock, which no program may give
            found.outcomes["error"] += 1
            found.differences.append((seed, repr(error), str(program)))
    for seed in seeds if nodes() else ():
        EARLIER.update(nodes())
        outcome = check(draw(seed))
        if alive := nodes():
            if outlives_in_stock(draw(seed)):
                found.outcomes[outcome] -= 1
                found.outcomes["same, and outlives its backward in stock too"] += 1
            else:
                found.differences.append((seed, f"{len(alive)} nodes outlive their graphs", str(draw(seed))))
    EARLIER.update(nodes())
    return found


def start_process() -> None:
    """One thread, as sums depend on how many there are; and what is loaded is no garbage."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    gc.collect()
    gc.freeze()


def chunks(seeds: range) -> list[range]:
    """``seeds``, a hundred at a time."""
    return [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]


def results(parts: list[range], jobs: int, until: float, is_taught: bool) -> Iterator[Found]:
    """Of each part that begins before ``until``, in order."""
    if jobs == 1:
        start_process()
        for part in parts:
            if time.monotonic() > until:
                return
            yield run(part, is_taught)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, start_process) as pool:
        for found in pool.map(partial(run, is_taught=is_taught), parts):
            yield found
            if time.monotonic() > until:
                pool.shutdown(cancel_futures=True)
                return


def as_markdown(summary: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"torch {summary['torch']}, transformers {summary['transformers']}, CPU",
        "",
        f"Seeds {summary['seeds']}: {summary['cases']:,} random programs in {summary['minutes']} minutes.",
        "",
        "| outcome | programs |",
        "| --- | --- |",
        *[f"| {name} | {count:,} |" for name, count in sorted(summary["outcomes"].items())],
        "",
        f"Differences: {len(summary['differences'])}.",
    ]
    for seed, message, program in summary["differences"]:
        lines += ["", f"Seed {seed}: {message}", "", "```", program, "```"]
    return "\n".join(lines) + "\n"


def parsed(text: str) -> range:
    """``A:B``."""
    first, _, last = text.partition(":")
    return range(int(first), int(last))


def main() -> int:
    """Read the command line; 1 if a program differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=parsed, default=range(2000), metavar="A:B", help="from A, below B")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after so many")
    parser.add_argument("--taught", action="store_true", help="on tapes that have seen the same program three times")
    parser.add_argument("--out", type=Path, help="folder for fuzz.md and fuzz.json")
    options = parser.parse_args()
    console, total, begun = Console(stderr=True), Found(), time.monotonic()
    parts = chunks(options.seeds)
    found_in = results(parts, options.jobs, begun + 60 * options.minutes, options.taught)
    for found in track(found_in, "fuzz", len(parts), console=console):
        total.add(found)
        for seed, message, program in found.differences:
            console.print(f"seed {seed}: {message}\n{program}", markup=False, highlight=False)
    cases = sum(total.outcomes.values())
    summary = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seeds": f"{options.seeds.start}:{options.seeds.start + cases}",
        "cases": cases,
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "outcomes": dict(total.outcomes),
        "differences": total.differences,
    }
    text = as_markdown(summary)
    console.print(text, markup=False, highlight=False)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "fuzz.md").write_text(text)
        (options.out / "fuzz.json").write_text(json.dumps(summary, indent=1) + "\n")
    return int(bool(total.differences))


if __name__ == "__main__":
    sys.exit(main())
