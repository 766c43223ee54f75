"""Two real processes over gloo: under every engine a patched model trains as stock does, and keeps what it keeps alone.

The cells are those of ``scripts/bench/engines.py``, a process of its own, as it forks. `make test` runs one row of
each engine.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.helpers import MATRIX

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "scripts" / "bench"
sys.path.insert(0, str(BENCH))
from engine_steps import CHECKPOINTING, ENGINES, TRAININGS  # noqa: E402
from engines import is_right, reason, rows, shown  # noqa: E402

pytestmark = pytest.mark.long


#: Ways to shard by FSDP2 that differ little from others.
ALIKE = {"fsdp2-norms", "fsdp2-mlp", "fsdp2-one", "hsdp-1x2"}


def is_chosen(row):
    """One row of each other engine, so that each training and each kind of checkpointing has some."""
    engine, training, checkpointing = row
    if engine in ALIKE:
        return False
    place = list(ENGINES).index(engine)
    return (TRAININGS[place % 2], CHECKPOINTING[place % 3]) == (training, checkpointing)


ROWS = [pytest.param("/".join(row), marks=() if is_chosen(row) else MATRIX) for row in rows()]


@pytest.fixture(scope="module")
def cells(request, tmp_path_factory):
    """Of the rows that are asked for."""
    items = [item for item in request.session.items if item.path == request.path]
    asked = [row for item in items if (row := item.callspec.params.get("row"))]
    file = tmp_path_factory.mktemp("engines") / "cells.json"
    command = [sys.executable, str(BENCH / "engines.py"), "--json", str(file), "--only", *asked]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert file.is_file(), done.stderr[-3000:]
    return json.loads(file.read_text())


@pytest.mark.parametrize("row", ROWS)
def test_training_is_stocks_and_keeps_what_the_model_alone_keeps(row, cells):
    stock, *patched = (cell for cell in cells if cell["row"] == row)
    assert patched if "error" not in stock else reason(stock), stock
    wrong = [cell for cell in patched if not is_right(cell, cells) and not (reason(cell) and cell.get("is_equal"))]
    assert not wrong, [f"{c['variant']}, {c['order']}: {shown(c, cells)} {c.get('text', '')}" for c in wrong]


@pytest.mark.parametrize("stage", [2, 3])
def test_the_configs_of_deepspeed_that_come_with_the_package_are_valid(stage):
    deepspeed = pytest.importorskip("deepspeed.runtime.zero.config")
    config = json.loads((ROOT / "configs" / "deepspeed" / f"zero{stage}.json").read_text())
    assert deepspeed.DeepSpeedZeroConfig(**config["zero_optimization"]).stage == stage
