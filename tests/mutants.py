"""Planted faults: each of ``mutants.yaml`` is put into a copy of the package, and the tests named with it must fail.

A mutant is a snippet that occurs once in the package (any white space between its words), and another in its place.
Tests are named by file, wherever that lies, and by words for ``-k``: without the fault they must pass. A mutant is
killed by a test that fails, not by what can no longer be imported, collected or set up.
"""

from __future__ import annotations

import argparse
import compileall
import gc
import importlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

ROOT, PACKAGE = Path(__file__).resolve().parents[1], "hf_memsave"
#: Seconds that the tests of one mutant may take.
MOST_SECONDS = 300
#: Imported once, before the processes that need it fork.
IMPORTED = "torch transformers.trainer transformers.models.auto.modeling_auto peft hypothesis".split()
IMPORTED += [f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama", "t5")]


class Mutant(NamedTuple):
    """One fault, in a sentence; the snippet ``old``, and ``new`` in its place; and the tests that see it."""

    name: str
    fault: str
    old: str
    new: str
    tests: str

    def places(self, package: Path) -> list[tuple[Path, re.Match[str]]]:
        """Where the snippet occurs."""
        words = re.compile(r"\s+".join(map(re.escape, self.old.split())))
        files = [path for path in sorted(package.rglob("*.py")) if "_vendor" not in path.parts]
        return [(path, found) for path in files for found in words.finditer(path.read_text(encoding="utf-8"))]

    def planted(self, package: Path) -> tuple[Path, str]:
        """The file that it changes, and the text of that with the fault, indented as what it replaces."""
        ((path, found),) = self.places(package)
        before = found.string[: found.start()]
        line = before[before.rfind("\n") + 1 :]
        new = self.new.rstrip().replace("\n", "\n" + " " * (len(line) - len(line.lstrip())))
        return path, before + new + found.string[found.end() :]


class Result(NamedTuple):
    """What became of tests, as :func:`outcome_of` says it, in how many seconds; and what pytest said."""

    outcome: str
    by: str = ""
    seconds: float = 0.0
    log: str = ""


def outcome_of(code: int, log: str) -> tuple[str, str]:
    """Read pytest's exit code and log: "killed" or "error" and by which test, "passed", "none" there or "timeout"."""
    if code == -signal.SIGALRM:
        return "timeout", ""
    summary = log.rpartition("short test summary info")[2]
    for outcome, word in (("killed", "FAILED"), ("error", "ERROR")):
        if found := re.search(rf"^{word} (.+?)(?: - |$)", summary, re.MULTILINE):
            return outcome, found[1]
    if code not in (0, 5):
        return "error", f"pytest ended with {code}"
    return "passed" if re.search(r"\b\d+ passed", summary) else "none", ""


def arguments(tests: str, root: Path) -> list[str]:
    """What pytest is called with: the path of each file, and the rest as it is."""
    words = shlex.split(tests)
    found = {word: list((root / "tests").rglob(word)) for word in words if word.endswith(".py")}
    if wrong := [word for word, paths in found.items() if len(paths) != 1]:
        raise ValueError(f"expected one file of this name under tests/, found {len(found[wrong[0]])}: {wrong[0]}")
    return [str(found[word][0]) if word in found else word for word in words]


def _test(root: Path, tree: Path, tests: str) -> int:
    """Run tests of a tree, in a process of its own that has imported none of it; returns pytest's exit code."""
    signal.alarm(MOST_SECONDS)
    output = os.open(tree / "mutant.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    here, theirs = [str(tree), str(tree / "tests")], {str(p / part) for p in (root, ROOT) for part in ("", "tests")}
    sys.path[:] = [*here, *(path for path in sys.path if path not in theirs)]
    os.environ |= {"PYTHONPATH": os.pathsep.join(here), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    return pytest.main(["-x", "-q", "-rfE", "-p", "no:cacheprovider", *arguments(tests, tree)])


def run(root: Path, jobs: int, tasks: Iterable[Mutant | str]) -> Iterator[tuple[Mutant | str, Result]]:
    """Run tests, as they are or those of a mutant, in as many processes and copies of the tree at once."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        left, free, running = list(tasks)[::-1], [Path(folder, str(i)) for i in range(jobs)], {}
        for tree in free:
            shutil.copytree(root, tree, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__"))
            compileall.compile_dir(tree / PACKAGE, quiet=1)
        while left or running:
            while left and free:
                task, tree, change, started = left.pop(), free.pop(), None, time.monotonic()
                if isinstance(task, Mutant):
                    path, text = task.planted(tree / PACKAGE)
                    change = path, path.read_text(encoding="utf-8")
                    path.write_text(text, encoding="utf-8")
                tests = task.tests if isinstance(task, Mutant) else task
                sys.stdout.flush()
                if (pid := os.fork()) == 0:
                    code = 3  # pytest's own for what it did not expect
                    try:
                        code = _test(root, tree, tests)
                    finally:
                        sys.stdout.flush()
                        os._exit(code)
                running[pid] = task, tree, change, started
            pid, status = os.wait()
            task, tree, change, started = running.pop(pid)
            if change is not None:
                change[0].write_text(change[1], encoding="utf-8")
            log = (tree / "mutant.log").read_text(errors="replace")
            outcome = outcome_of(os.waitstatus_to_exitcode(status), log)
            yield task, Result(*outcome, time.monotonic() - started, log)
            free.append(tree)


def read(table: Path) -> list[Mutant]:
    """The mutants of a file."""
    return [Mutant(**row) for row in yaml.safe_load(table.read_text(encoding="utf-8"))]


def main(argv: Sequence[str] | None = None, root: Path = ROOT, imported: Sequence[str] = IMPORTED) -> int:
    """Run the mutants; 0 where all that were asked for are killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=ROOT / "tests" / "mutants.yaml")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants; all if left out")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write a table of the results")
    options = parser.parse_args(argv)
    mutants = [m for m in read(options.table) if options.only is None or m.name in options.only]
    found: dict[Mutant | str, Result] = {}
    for mutant in mutants:
        if (count := len(mutant.places(root / PACKAGE))) != 1:
            found[mutant] = Result("to be stated again", f"its snippet occurs {count} times")
            print(f"!!! {mutant.name}: to be stated again: its snippet occurs {count} times: {mutant.fault}")
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: its kernels run without a GPU
    for name in imported:
        importlib.import_module(name)
    gc.freeze()
    stock = dict.fromkeys(mutant.tests for mutant in mutants if mutant not in found)
    for tasks in (stock, (m for m in mutants if m not in found and found[m.tests].outcome == "passed")):
        for task, result in run(root, options.jobs, tasks):
            found[task] = result
            is_good = result.outcome == ("killed" if isinstance(task, Mutant) else "passed")
            name = task.name if isinstance(task, Mutant) else task
            print(f"{'' if is_good else '!!! '}{name}: {result.outcome} {result.by} {result.seconds:.1f} s", flush=True)
            print(result.log[-2000:] if result.outcome == "error" else "", end="")
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, cwd=root, capture_output=True, text=True).stdout.strip()
    results = [found.get(mutant, Result("not asked", "its tests do not pass without it")) for mutant in mutants]
    killed = sum(result.outcome == "killed" for result in results)
    title = f"{killed} of {len(mutants)} mutants are killed, at {commit}."
    lines = ["# Planted faults\n", f"`make mutants`: {title}\n", "| name | fault | by | s |", "|---|---|---|---|"]
    for mutant, result in zip(mutants, results, strict=True):
        by = f"`{result.by.partition('::')[2]}`" if result.outcome == "killed" else f"**{result.outcome}** {result.by}"
        cells = mutant.name, mutant.fault, by, f"{result.seconds:.1f}"
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    print(title)
    if options.out is not None:
        options.out.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return int(killed < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
