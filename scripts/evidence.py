"""Regenerate every table that needs no GPU, and compare each committed figure with the fresh one.

    make evidence ARGS="--data-root FOLDER"    # all; a run that was cut short goes on where it was
    make evidence ARGS=--quick                 # minutes
    make evidence ARGS="--only wta-crs-memory fuzz"

FOLDER has official GLUE folders under glue/, and under text/ a tinyshakespeare.txt and a bert-base-uncased-vocab.txt;
what needs it is left out without it, which is said. Fresh tables and pictures go to --out, and committed ones stay as
they are: copy what you mean to commit. A run whose code, versions and command are those of an earlier one is not
repeated. What times, and what uses all cores, runs alone; the rest --jobs at a time. The exit status is 1 if a figure
is out of its bound, a row is missing on either side, or a script fails.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from code_version import code_version
from evidence_compare import MACHINE, Bound, differences

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scripts" / "results"

_BYTES = Bound(relative=0.01, absolute=0.02)  # what is counted; the last printed digit may fall to either side
_TIME = Bound(relative=0.35)  # a ratio of times on a machine that others share
_TIME_ELSEWHERE = Bound(factor=2.0)  # on another CPU than the committed table names
_CPU = re.compile(r"\bCPU [^|]*?\(family \d+, model \d+\)")
_ERROR = Bound(relative=0.1, absolute=1e-9)
_DISTANCE = Bound(relative=0.1, absolute=1e-7)  # of fp32 from float64: a CPU's kernels round in their own order


@dataclass(frozen=True)
class Evidence:
    """A script, and how what it writes is compared.

    ``command`` is of ``scripts/``, with {out} for the folder it writes to and {glue} or {text} for given data.
    ``names`` counts the first columns, which name a row.
    Where ``table`` is None, all that is asked for is the script's exit status. ``chance`` has words -> others that may
    stand in their place. ``beside`` is for a script of one thread, which others do not disturb: they may run beside it.
    """

    name: str
    command: str
    names: int = 1
    bounds: dict[str, Bound] = field(default_factory=dict)
    table: Path | None = None
    partly: bool = False
    quick: bool = False
    beside: bool = False
    chance: dict[str, str] = field(default_factory=dict)

    @property
    def needs_data(self) -> bool:
        """Whether it reads what --data-root names."""
        return "{glue}" in self.command or "{text}" in self.command


def _table(name: str, command: str, **how: object) -> Evidence:
    return Evidence(name, command, table=RESULTS / f"{name}.md", **how)  # type: ignore[arg-type]


_RATIOS = {"*MiB*": _BYTES, "*peak*": _BYTES, "layer, ms": MACHINE, "time*": _TIME, "*freed*": Bound(absolute=0.5)}
#: Other kernels round otherwise, and training takes another path: losses of many batches agree (other draws of rows
#: moved them by .007 at most), dev metrics less.
_METRICS = {"*loss*": Bound(absolute=0.02), "range": MACHINE, "*": Bound(errors=4)}
EVIDENCE = (
    _table("estimate-records", "bench/estimate_records.py --out {out}",
           bounds={"seconds": MACHINE, "difference": Bound(absolute=0.1), "*": _BYTES}, beside=True),
    Evidence("estimate-on-cpu", "bench/estimate_on_cpu.py --family llama --out {out}", names=3,
             bounds={"said*": Bound(absolute=0.5), "*": _BYTES}, table=RESULTS / "estimate-on-cpu.md", partly=True,
             beside=True),
    _table("launches", "bench/launches.py --out {out}", names=2, bounds={"*": _BYTES}, beside=True),
    _table("inverse-derivatives", "bench/inverse_errors.py --out {out}", bounds={"*": _ERROR}, quick=True,
           beside=True),
    _table("approximate-steps", "bench/approximate_steps.py --out {out}", names=2, beside=True,
           bounds={"from float64": _DISTANCE, "spread": Bound(relative=0.25), "*": _ERROR}),  # a spread of 20: +- 16%
    _table("wta-crs-memory", "bench/wta_crs.py --part memory --threads 1 --out {out}", names=3, bounds={"*": _BYTES},
           quick=True, beside=True),
    _table("wta-crs-speed", "bench/wta_crs.py --part speed --threads 2 --out {out}",
           bounds={"*ms": MACHINE, "*": _TIME}),
    _table("selective", "bench/selective.py --batch 2 --steps 5 --out {out}", names=3,
           bounds={"*time": _TIME, "*": _BYTES}),
    _table("sweep-models", "bench/sweep_models.py --out {out}", bounds={"*": Bound(absolute=0.02)},
           chance={"stock differs from itself": "="}),
    Evidence("sweep-models-quick", "bench/sweep_models.py --types bert gpt2 llama t5 --out {out}",
             bounds={"*": Bound(absolute=0.02)}, table=RESULTS / "sweep-models.md", partly=True, quick=True),
    _table("engines", "bench/engines.py --out {out}", names=2, bounds={"*": _BYTES}),
    _table("techniques", "bench/techniques.py --out {out}", bounds=_RATIOS),
    _table("host-time", "bench/host_time.py --seconds 12 --out {out}", names=2,
           bounds={"limit": Bound(), "steps": MACHINE, "*ms": MACHINE, "*": _TIME}),
    _table("fused-host-time", "bench/fused_host_time.py --out {out}", names=2,
           bounds={"step, stock, ms": MACHINE, "*": _TIME}, quick=True),
    _table("ways-to-keep-less", "bench/ways_to_keep_less.py --out {out}", names=2,
           bounds={"time*": _TIME, "*": _BYTES}),
    _table("peak-over-training", "bench/peak_over_training.py --out {out}",
           bounds={"resident*": MACHINE, "*": _BYTES}, beside=True),
    Evidence("families", "bench/families.py --steps 8 --out {out}",
             bounds={"time*": _TIME, "*": _BYTES}, table=ROOT / "docs" / "numbers.md", partly=True),
    Evidence("fuzz", "fuzz.py --seeds 0:2000 --jobs 2 --out {out}"),
    Evidence("fuzz-quick", "fuzz.py --seeds 0:200 --out {out}", quick=True, beside=True),
    Evidence("threads", "bench/threads.py --seconds 60", quick=True),
    _table("loss-curves", "bench/loss_curves.py --text {text}/tinyshakespeare.txt "
           "--vocab {text}/bert-base-uncased-vocab.txt --out {out}", bounds={"*": Bound(relative=0.01)}),
    _table("compare-llama-10m", "bench/compare_runs.py --text {text}/tinyshakespeare.txt --out {out}",
           bounds={"s/step": MACHINE, "p10 s/step": MACHINE, "ratio": MACHINE, "p10 ratio": _TIME, "freed": Bound(0, 1),
                   "*": Bound(relative=0.01)}, beside=True),  # of its quickest steps
    _table("wta-mass", "bench/wta_mass.py --glue {glue} --out {out}", bounds={"*": Bound(relative=0.2, absolute=0.05)},
           beside=True),
    _table("wta-training", "bench/training.py wta --glue {glue} --cache {out}/cache --out {out}",
           bounds=_METRICS),
    _table("approximate-training", "bench/training.py approximate --glue {glue} --cache {out}/cache --out {out}",
           bounds=_METRICS),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is chosen, and report; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[one.name for one in EVIDENCE], metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="those that take minutes")
    parser.add_argument("--data-root", type=Path, metavar="FOLDER", help="with glue/ and text/")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "evidence", metavar="DIR")
    parser.add_argument("--jobs", type=int, default=2, help="scripts of one thread, at a time")
    parser.add_argument("--again", action="store_true", help="repeat what was run with this code before")
    parser.add_argument("--list", action="store_true", help="the names and commands, and nothing else")
    options = parser.parse_args(argv)
    chosen = [one for one in EVIDENCE if one.name in (options.only or [one.name])]
    if not options.only:  # a part of a table says nothing where the whole table is asked for
        chosen = [one for one in chosen if one.quick == options.quick or (one.quick and "-quick" not in one.name)]
    if options.list:
        for one in chosen:
            print(f"{one.name}: python scripts/{one.command}")
        return 0
    for one in chosen:
        if one.needs_data and options.data_root is None:
            print(f"{one.name}: left out, since it needs --data-root")
    chosen = [one for one in chosen if options.data_root is not None or not one.needs_data]

    def is_wrong(one: Evidence) -> bool:
        return not check(one, options.out / one.name, options.data_root, again=options.again)

    wrong = [one.name for one in chosen if not one.beside and is_wrong(one)]
    beside = [one for one in chosen if one.beside]
    with ThreadPoolExecutor(options.jobs) as pool:
        wrong += [one.name for one, fails in zip(beside, pool.map(is_wrong, beside), strict=True) if fails]
    if wrong:
        print(f"Not as committed: {', '.join(wrong)}.")
    return int(bool(wrong))


def check(one: Evidence, out: Path, data: Path | None, *, again: bool = False) -> bool:
    """Run one script, if that was not done or is asked for ``again``, and say what of its table is not as committed.

    ``out`` is a folder of its own, ``data`` has glue/ and text/.
    """
    out.mkdir(parents=True, exist_ok=True)
    folders = {name: str((data or Path()).resolve() / name) for name in ("glue", "text")}
    script, *arguments = shlex.split(one.command)
    version, state = code_version((one.command, str(data))), out / "finished.json"
    folders["out"] = str(out.resolve())
    command = [str(ROOT / "scripts" / script), *(text.format(**folders) for text in arguments)]
    known = json.loads(state.read_text(encoding="utf-8")) if state.is_file() and not again else {}
    if known.get("version") != version:
        print(f"{one.name}: running; its output is in {out / 'log.txt'}", flush=True)
        begin = time.monotonic()
        with (out / "log.txt").open("w", encoding="utf-8") as log:
            done = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=log, stderr=log, check=False)
        known = {"version": version, "status": done.returncode, "minutes": round((time.monotonic() - begin) / 60, 1)}
        state.write_text(json.dumps(known) + "\n", encoding="utf-8")
    found, figures = _compared(one, out) if known["status"] == 0 else ([], 0)
    if known["status"] != 0:
        state.unlink()  # to be tried again
        found = [f"{script} ended with status {known['status']}; see {out / 'log.txt'}"]
    said = f"{one.name}: {len(found)} differences, {figures} figures, {known['minutes']} minutes"
    print("\n  ".join([said, *found]), flush=True)  # in one piece: others may print too
    return not found


def _compared(one: Evidence, out: Path) -> tuple[list[str], int]:
    if one.table is None:
        return [], 0
    name = "families" if one.name == "families" else one.table.stem  # whose table is a part of a page
    committed, measured = (path.read_text(encoding="utf-8") for path in (one.table, out / f"{name}.md"))
    made, here = (_CPU.search(text) for text in (committed, measured))
    is_elsewhere = made is not None and here is not None and made[0] != here[0]
    bounds = {column: _TIME_ELSEWHERE if is_elsewhere and b is _TIME else b for column, b in one.bounds.items()}
    for words, others in one.chance.items():
        committed, measured = committed.replace(words, others), measured.replace(words, others)
    return differences(committed, measured, one.names, bounds, partly=one.partly)


if __name__ == "__main__":
    sys.exit(main())
