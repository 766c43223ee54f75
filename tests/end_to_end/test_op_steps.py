"""PyTorch's own samples of its operations and modules: five steps of each, patched, equal stock's to the bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
#: Run, as "dtype-variant" -> how many cases are equal, at least. A plain one takes two samples of each operation.
RUNS = {
    "float32-plain": 1950, "complex64-plain": 980, "bfloat16-plain": 1430, "float32-autocast": 920,
    "float32-checkpoint": 920, "float32-gate": 920, "bfloat16-block": 670,
}  # fmt: skip
#: Of how many operations and modules `make test` takes one, in each run the next ones.
EVERY = 120


def check(least, every=1):
    """Run what ``least`` names, in a process of its own: so many cases are equal, and few stock cannot judge."""
    command = [sys.executable, "-m", "support.op_steps", *least, "--every", str(every)]
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS)))}
    done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [one["run"] for one in found] == [*least]
    for one in found:
        counts, run = one["counts"], one["run"]
        print(run, counts, "remade:", one["remade"], f"{one['seconds']} s", one["told"])
        assert "different" not in counts, f"{run}: {one['told']['different']}"
        assert counts["equal"] >= least[run], f"{run}: few cases were compared: {counts}"
        if run.endswith(("checkpoint", "gate", "block")):
            assert one["remade"]["the product"] > counts["equal"] / 2, f"{run}: few ran again: {one['remade']}"
        assert "TypeError" not in str(one["told"]), f"{run}: an operation is called wrongly: {one['told']}"
    equal = sum(one["counts"]["equal"] for one in found)
    assert equal > 0.9 * sum(sum(one["counts"].values()) for one in found), f"stock is no measure: {found}"
    for what, part in (("anything", 0.85), ("by other functions", 0.15)):
        assert sum(one["remade"][what] for one in found) > part * equal, f"few cases remade {what}: {found}"


def test_some_of_pytorchs_operations_and_modules_train_as_in_stock():
    check({run: cases // EVERY * 0.7 for run, cases in RUNS.items()}, EVERY)


@pytest.mark.long
@pytest.mark.parametrize("run", RUNS)
def test_every_operation_and_module_of_pytorch_trains_as_in_stock(run):
    check({run: RUNS[run]})
