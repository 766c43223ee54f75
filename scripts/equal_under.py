"""Another project's tests under hf_memsave: equal outcomes, and equal losses and gradients to the bit?

    python scripts/equal_under.py [--memsave PRESET] [--keep FOLDER] -- <arguments of pytest>

Runs the tests three times, each in a process of its own: stock, stock again, and with every model patched. Compares,
test by test, the outcome and a hash of each loss and of the gradients after each backward; a test that two stock runs
do not agree on is not compared. The exit status is 0 if nothing differs, 1 if something does, and 2 if a stock run
broke off or if no backward of a patched model was compared.

A module is patched when it is called from outside of all others with gradients enabled, and again when its modules are
not the same any more. What :func:`hf_memsave.patch` refuses stays stock and is counted.

It is a plugin of pytest as well, for one of these runs alone (with ``scripts/`` on ``PYTHONPATH``)::

    python -m pytest -p equal_under --memsave stock --hashes stock.jsonl ...
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

STOCK, RUNS = "stock", ("stock", "again", "patched")
#: What a test can turn out to be; the first three are differences, an unstable test is not compared.
KINDS = ("differ", "only fails patched", "other outcome", "unstable", "same", "same, nothing to compare")


def digest(tensor: Tensor) -> str:
    """A hash of shape, dtype and bytes; the type alone where there are no bytes to read."""
    try:
        dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
        flat = dense.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, NotImplementedError, TypeError):
        return f"{type(tensor).__name__} without bytes"
    head = f"{tuple(tensor.shape)} {tensor.dtype} "
    return hashlib.blake2b(head.encode() + flat.tobytes(), digest_size=8).hexdigest()


def leaves(roots: Iterable[Tensor]) -> list[Tensor]:
    """The tensors that a backward from ``roots`` gives gradients to."""
    found = {id(root): root for root in roots if root.is_leaf}
    seen: set[Any] = {None}
    nodes = [root.grad_fn for root in roots]
    while nodes:
        if (node := nodes.pop()) not in seen:
            seen.add(node)
            nodes += [after for after, _ in node.next_functions]
            if (variable := getattr(node, "variable", None)) is not None:
                found[id(variable)] = variable
    return list(found.values())


def _tensors(value: Any) -> list[Tensor]:
    values = [value] if isinstance(value, Tensor) else [] if value is None else list(value)
    return [each for each in values if isinstance(each, Tensor)]


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    stock = getattr(owner, name)
    setattr(owner, name, functools.wraps(stock)(lambda *args, **kwargs: around(stock, *args, **kwargs)))


class Plugin:
    """Seeds each test, patches the models in it, and writes what its backwards gave."""

    def __init__(self, memsave: str, file: Path | None) -> None:
        self.memsave, self.file, self.local = memsave, file, threading.local()
        self.outcomes: dict[str, str] = {}
        self.seen: dict[str, Any] = {"patched_calls": 0, "refused": [], "backwards": []}
        self.known: weakref.WeakKeyDictionary[nn.Module, tuple[int, ...]] = weakref.WeakKeyDictionary()
        self.covered: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        _wrap(nn.Module, "__call__", self.call)
        _wrap(torch.autograd, "backward", self.differentiate)
        _wrap(torch.autograd, "grad", self.differentiate)

    def call(self, stock: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Patch the outermost module."""
        is_inside = getattr(self.local, "is_inside", False)
        if is_inside or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return stock(module, *args, **kwargs)
        self.local.is_inside = True
        try:
            before = type(module).__call__
            self.patch(module)
            self.seen["patched_calls"] += module in self.covered
            after = type(module).__call__  # ours where a forward on the instance hides that of the class
            return (stock if after is before else after)(module, *args, **kwargs)
        finally:
            self.local.is_inside = False

    def patch(self, module: nn.Module) -> None:
        """Patch a module if it is new, or has got other modules."""
        parts = tuple(map(id, module.modules()))
        is_part = module in self.covered and module not in self.known  # as where a checkpoint runs it again
        if self.memsave == STOCK or is_part or self.known.get(module) == parts:
            return
        from hf_memsave import PatchError, patch

        self.known[module] = parts
        try:
            patch(module, self.memsave)
            self.covered.update(module.modules())
        except PatchError as error:
            self.seen["refused"].append(f"{type(module).__name__}: {error}")

    def differentiate(self, stock: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Note what is differentiated, and what has a gradient then."""
        roots = _tensors(outputs)
        reached = leaves(roots) + _tensors(kwargs.get("inputs"))
        entry = {"losses": [digest(root) for root in roots], "gradients": "raised"}
        self.seen["backwards"].append(entry)
        result = stock(outputs, *args, **kwargs)
        gradients = [leaf.grad for leaf in reached if leaf.is_leaf or leaf.retains_grad] if result is None else result
        entry["gradients"] = sorted(map(digest, _tensors(gradients)))
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """One seed for every test, whatever ran before it."""
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        self.seen = {"patched_calls": 0, "refused": [], "backwards": []}
        item.user_properties.append(("equal_under", self.seen))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the line of a test that has ended."""
        before = self.outcomes.get(report.nodeid, "passed")
        self.outcomes[report.nodeid] = before if report.passed or before == "failed" else report.outcome
        if report.when == "teardown" and self.file is not None:
            line = {"test": report.nodeid, "outcome": self.outcomes[report.nodeid]}
            with self.file.open("a") as file:
                file.write(json.dumps(line | dict(report.user_properties)["equal_under"]) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The two options of one run."""
    parser.addoption("--memsave", default="exact", help=f"what to patch models with: a preset, as in gate, or {STOCK}")
    parser.addoption("--hashes", type=Path, help="the file to write a line of JSON to for each test")


def pytest_configure(config: pytest.Config) -> None:
    """One thread: sums in the same order each time."""
    torch.set_num_threads(1)
    file = None if hasattr(config, "workerinput") else config.getoption("--hashes")  # xdist's workers report
    if file is not None:
        file.unlink(missing_ok=True)
    config.pluginmanager.register(Plugin(config.getoption("--memsave"), file))


def read(file: Path) -> dict[str, dict[str, Any]]:
    """Test -> what one run wrote of it."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {line.pop("test"): line for line in map(json.loads, lines)}


def kind(first: dict[str, Any], second: dict[str, Any], patched: dict[str, Any]) -> str:
    """Which of :data:`KINDS` a test is, from what its three runs wrote ({}: nothing)."""
    outcome, backwards, now = first.get("outcome"), first.get("backwards"), patched.get("outcome")
    if (outcome, backwards) != (second.get("outcome"), second.get("backwards")):
        return "unstable"
    if outcome != now:
        return "only fails patched" if outcome and now == "failed" else "other outcome"
    if backwards != patched["backwards"]:
        return "differ"
    return "same" if backwards and patched["patched_calls"] else "same, nothing to compare"


def compare(folder: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Kind -> test -> what the three runs in a folder wrote of it."""
    runs = [read(folder / f"{name}.jsonl") for name in RUNS]
    tests = {test: [run.get(test, {}) for run in runs] for test in dict.fromkeys(test for run in runs for test in run)}
    return {name: {test: lines for test, lines in tests.items() if kind(*lines) == name} for name in KINDS}


def report(folder: Path) -> int:
    """Print the table, each difference and each unstable test; the exit status."""
    found, table = compare(folder), Table("tests", "stock beside patched")
    for name in KINDS:
        table.add_row(str(len(found[name])), name)
    Console().print(table)
    same = [patched for _, _, patched in found["same"].values()]
    backwards = sum(len(patched["backwards"]) for patched in same)
    print(f"same: {backwards} backwards;", dict(Counter(patched["outcome"] for patched in same)))
    refused = Counter(r for tests in found.values() for *_, p in tests.values() for r in p.get("refused", ()))
    for reason, count in refused.most_common():
        print(f"refused {count} x {reason}")
    for name in KINDS[:4]:
        for test, lines in found[name].items():
            print(f"{name}: {test}:", ", ".join(line.get("outcome", "no outcome") for line in lines))
    return 1 if any(found[name] for name in KINDS[:3]) else 0 if same else 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests three times, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memsave", default="exact", metavar="PRESET", help="what to patch models with, as in gate")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where to keep the runs' hashes and output")
    parser.add_argument("pytest", nargs="+", help="arguments of pytest, after --")
    options = parser.parse_args(arguments)
    folder = (options.keep or Path(tempfile.mkdtemp(prefix="equal-under-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(Path(__file__).resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    for name, memsave in zip(RUNS, (STOCK, STOCK, options.memsave), strict=True):
        command = [sys.executable, "-m", "pytest", "-p", "equal_under", "--memsave", memsave]
        command += ["--hashes", str(folder / f"{name}.jsonl"), *options.pytest]
        with (folder / f"{name}.txt").open("w") as out:
            environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}
            status = subprocess.run(command, env=environment, stdout=out, stderr=out).returncode
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            print(f"{name}: pytest broke off with status {status}; its output is in {folder / name}.txt")
            if memsave == STOCK:
                return 2
    return report(folder)


if __name__ == "__main__":
    sys.exit(main())
