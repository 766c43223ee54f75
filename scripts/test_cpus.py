"""Run the tests that compare bits as other processors would: instruction sets of PyTorch, oneDNN and MKL, and threads.

    python scripts/test_cpus.py [--out scripts/results/cpus.json] [ARGUMENTS OF PYTEST ...]     # or: make test-cpus

A processor can be told to use fewer instructions than it has, never more: run it on several. The rows of this one, by
its name, are replaced in --out and in the table beside it. Each instruction set runs with one thread, the widest with
2 and 4 too.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from test_torch import ROOT, outcomes

TESTS = [f"tests/{folder}" for folder in ("end_to_end", "tape", "ops", "attacks", "integrations")]
#: An instruction set, the flag of a processor that has it, and how PyTorch, oneDNN and MKL are told to use no more.
_SETS = (
    ("baseline", "sse2", "default", "SSE41", "SSE4_2"),
    ("AVX2", "avx2", "avx2", "AVX2", "AVX2"),
    ("AVX-512", "avx512f", "avx512", "AVX512_CORE", "AVX512"),
    ("AVX-512, bf16", "avx512_bf16", "avx512", "AVX512_CORE_BF16", "AVX512"),
    ("AMX", "amx_tile", "avx512", "AVX512_CORE_AMX", "AVX512"),
)
_VARIABLES = "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"
_HEADER = ["processor", "instructions", "threads", "passed", "skipped", "failed", "minutes", "torch", "commit", "date"]


def main() -> int:
    """Run under each setting, and note; 1 where a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "scripts" / "results" / "cpus.json")
    parser.add_argument("--only", help="these instructions, with one thread, as 'AVX2'")
    options, more = parser.parse_known_args()
    name, flags = processor()
    sets = [(words, dict(zip(_VARIABLES, most, strict=True))) for words, flag, *most in _SETS if flag in flags]
    settings = [(*one, 1) for one in sets] + [(*sets[-1], threads) for threads in (2, 4)]
    if options.only:
        settings = [one for one in settings if (one[0], one[2]) == (options.only, 1)]
    if not settings:
        parser.error(f"--only: expected one of {', '.join(words for words, _ in sets)}, got {options.only}")
    rows: list[dict[str, Any]] = []
    for words, wanted, threads in settings:
        started, environment = time.monotonic(), {**wanted, "TEST_THREADS": str(threads)}
        with tempfile.TemporaryDirectory() as folder:
            arguments = ["--part", "first", *(more or TESTS)]
            passed, skipped, failed = outcomes(
                Path(sys.executable), arguments, Path(folder, "report.xml"), **environment
            )
        row = {"processor": name, "instructions": words, "threads": threads, "passed": passed, "skipped": skipped}
        minutes = round((time.monotonic() - started) / 60, 1)
        rows.append({**row, "failed": failed, "minutes": minutes} | about())
        if not more:  # a part of the tests is no row of the table
            note(options.out, rows)
    return int(any(row["failed"] for row in rows))


def processor() -> tuple[str, set[str]]:
    """Return the processor's name, and the flags of what it can do."""
    told = Path("/proc/cpuinfo").read_text()
    fields = dict(re.findall(r"^(model name|flags)\s*: (.*)$", told, re.MULTILINE))
    return fields["model name"], set(fields["flags"].split())


def about() -> dict[str, Any]:
    """Return what the figures hold for."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    return {"torch": torch.__version__, "commit": commit.strip(), "date": str(date.today())}


def _setting(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["processor"], row["instructions"], row["threads"]


def note(out: Path, rows: list[dict[str, Any]]) -> None:
    """Write these rows in the place of those of the same setting, and the table."""
    known = {_setting(one): one for one in (json.loads(out.read_text()) if out.exists() else [])}
    every = list((known | {_setting(row): row for row in rows}).values())
    out.write_text(json.dumps(every, indent=1) + "\n")
    lines = ["Tests that compare bits, by what the processor is told to use", "", f"| {' | '.join(_HEADER)} |"]
    lines.append(f"|{' --- |' * len(_HEADER)}")
    for one in every:
        cells = {**one, "skipped": sum(one["skipped"].values()), "failed": len(one["failed"])}
        lines.append(f"| {' | '.join(str(cells[column]) for column in _HEADER)} |")
    lines += ["", *(f"- failed, {one['instructions']}: {test}" for one in every for test in one["failed"])]
    lines += ["Reasons to skip a case:", ""]
    lines += [f"- {reason}" for reason in sorted({reason for one in every for reason in one["skipped"]})]
    out.with_suffix(".md").write_text("\n".join([*lines, "", "`make test-cpus`", ""]))


if __name__ == "__main__":
    sys.exit(main())
