"""Run the tests that PyTorch's version decides with another version, in an environment of its own, and note the counts.

    python scripts/test_torch.py 2.11.0 [--keep]     # or: make test-torch TORCH=2.11.0

The environment is --folder, with the versions of constraints.txt but for what PyTorch itself asks for, and removed
afterwards unless --keep is given. Wheels of most versions are CUDA builds of 3 to 6 GB; the tests run on CPU. That
version's row in scripts/results/torch-versions.json and .md is replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parents[1]
#: Where a row stands for each version.
OUT = ROOT / "scripts" / "results" / "torch-versions.json"
#: Run in full; of every other file what `make test` runs.
WHOLE = ["tests/end_to_end/test_bits.py", "tests/end_to_end/test_kept.py", "tests/tape", "tests/attacks",
         "tests/measure/test_fake_device.py"]  # fmt: skip
_RUNS = {
    "others": ["--part", "first", *[f"--ignore={p}" for p in WHOLE]],
    "whole": WHOLE,
}
#: What constraints.txt does not decide.
_ITS_OWN = re.compile(r"(torch|triton|numpy)==")
_TITLE = (
    "Tests by version of PyTorch, on CPU: bits, kept bytes, tape, attacks and the stand-in device in full, and of all "
    "other files what `make test` runs; before 2026-11-26 these tests had three times the cases"
)
_HEADER = ["torch", "triton", "transformers", "passed", "skipped", "failed", "commit", "date"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, run both, and note; 1 where a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="of torch")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-torch", help="for the environment")
    parser.add_argument("--keep", action="store_true", help="leave it")
    options = parser.parse_args(arguments)
    python = options.folder / "bin" / "python"
    try:
        install(options.folder, python, options.version)
        row = versions(python) | tested(python, options.folder)
    finally:
        if not options.keep:
            shutil.rmtree(options.folder, ignore_errors=True)
    note(row)
    return int(bool(row["failed"]))


def install(folder: Path, python: Path, version: str) -> None:
    """Make the environment: PyTorch first and alone, as the build of it decides what the rest is."""
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not _ITS_OWN.match(line)]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join([*pins, f"torch=={version}", "numpy<2.4"]))  # as Triton's interpreter before 3.7
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["test"]
    rest = [one for one in extras[1:] if not one.startswith("deepspeed")]  # which is built against one PyTorch
    for wanted in (["torch", "setuptools>=77", "wheel"], ["-e", f".{extras[0].removeprefix('hf_memsave')}", *rest]):
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints]
        subprocess.run([*pip, *wanted], check=True, cwd=ROOT)
    loads = [python, "-c", "import transformers.modeling_utils"]
    if subprocess.run(loads, check=False, capture_output=True).returncode:
        subprocess.run([python, "-m", "pip", "uninstall", "--yes", "torchao"], check=True)  # made for newer versions


def versions(python: Path) -> dict[str, Any]:
    """The versions of the libraries that decide, and the commit."""
    names = ("torch", "triton", "transformers", "peft")
    ask = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names}}}))"
    found: dict[str, Any] = json.loads(subprocess.run([python, "-c", ask], check=True, capture_output=True).stdout)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    return found | {"commit": commit.strip(), "date": str(date.today())}


def tested(python: Path, folder: Path) -> dict[str, Any]:
    """How many cases passed, and which were skipped or failed."""
    passed, skipped, failed = 0, Counter[str](), []
    for name, run in _RUNS.items():
        extensions = str(folder / "extensions")  # in the same folder PyTorch 2.11 waits for ever for what 2.14 leaves
        environment = {"CUDA_VISIBLE_DEVICES": "", "TORCH_EXTENSIONS_DIR": extensions}
        found = outcomes(python, run, folder / f"{name}.xml", **environment)
        passed, skipped, failed = passed + found[0], skipped + found[1], failed + found[2]
    return {"passed": passed, "skipped": dict(skipped), "failed": failed}


def outcomes(
    python: Path, arguments: Sequence[str], report: Path, **environment: str
) -> tuple[int, Counter[str], list[str]]:
    """Run pytest; returns how many cases passed, how many were skipped by reason, and what failed, pytest too."""
    passed, skipped, failed = 0, Counter[str](), []
    command = [python, "-m", "pytest", "-q", "-n", "logical", "--dist", "worksteal", f"--junitxml={report}", *arguments]
    report.unlink(missing_ok=True)
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=False)
    if done.returncode > 1 or not report.exists():  # 1: tests failed, which it names
        failed.append(f"{' '.join(arguments)}: pytest ended with {done.returncode}")
    for case in ET.parse(report).iter("testcase") if report.exists() else ():
        outcome = next((o for o in case if o.tag in ("skipped", "failure", "error")), None)
        if outcome is None:
            passed += 1
        elif outcome.tag == "skipped":
            skipped[outcome.get("message", "")] += 1
        else:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    return passed, skipped, failed


def note(row: dict[str, Any]) -> None:
    """Replace the row of that version, and write the table."""
    rows = json.loads(OUT.read_text()) if OUT.exists() else []
    rows = [one for one in rows if one["torch"].partition("+")[0] != row["torch"].partition("+")[0]] + [row]
    rows.sort(key=lambda one: [int(number) for number in re.findall(r"\d+", one["torch"])])
    OUT.write_text(json.dumps(rows, indent=1) + "\n")
    lines = [_TITLE, "", f"| {' | '.join(_HEADER)} |", f"|{' --- |' * len(_HEADER)}"]
    for one in rows:
        cells = {**one, "skipped": sum(one["skipped"].values()), "failed": len(one["failed"])}
        lines.append(f"| {' | '.join(str(cells[name]) for name in _HEADER)} |")
    for one in rows:
        lines += ["", f"{one['torch']}: skipped", ""]
        lines += [f"- {n}: {reason}" for reason, n in sorted(one["skipped"].items(), key=lambda item: -item[1])]
        lines += [f"- failed: {name}" for name in one["failed"]]
    OUT.with_suffix(".md").write_text("\n".join([*lines, "", "`make test-torch TORCH=...`", ""]))


if __name__ == "__main__":
    sys.exit(main())
