"""Training with approximate gradients, in fp32 and bf16, on a task that tells the methods apart.

Bounds come from other seeds than those that are trained here: scripts/results/approximate-steps.json.
"""

import functools
import itertools
import json
import math
import statistics
import sys

import pytest

from hf_memsave.ops.approximate.inverse import slope
from support.helpers import only_on_cpu
from support.script_helpers import BENCH, SCRIPTS
from support.slopes import PLANTED

sys.path.insert(0, str(BENCH))
import approximate_steps as steps  # noqa: E402

SEEDS = range(4)
#: Standard deviations of a mean over :data:`SEEDS`, of which chance gives more once in two thousand times.
SIGMAS = 3.5
#: Each is finer than the next one. In bf16 invert and few_bit 8 err by as little as rounding, and stock by as much as
#: norm="output" is away from it.
ORDERS = {
    "fp32": (("norm output", "invert", "int8"), ("few_bit 8", "int8", "int4", "few_bit 2"), ("int4", "few_bit 1")),
    "bf16": (
        ("invert", "int8", "precision_bit", "int4", "few_bit 2"),
        ("few_bit 8", "int8"),
        ("int4", "few_bit 1"),
        ("norm output", "few_bit 2"),
    ),
}
DTYPES = pytest.mark.parametrize("dtype", ORDERS)


@pytest.fixture(autouse=True)
def claimed(device):
    only_on_cpu(device, "the bits of exact training")


def logs_of_others(dtype):
    """Method -> logarithms of its distances to exact training, by the other seeds."""
    found = json.loads((SCRIPTS / "results" / "approximate-steps.json").read_text())[f"{dtype}, from exact"]
    return {name: [math.log(value) for value in values] for name, values in found.items()}


@functools.cache
def logs(dtype):
    found = [steps.distances(steps.DTYPES[dtype], seed)["exact"] for seed in SEEDS]
    return {name: [math.log(by_name[name]) for by_name in found] for name in steps.METHODS}


def mean_and_room(values):
    """What the mean over :data:`SEEDS` is expected to be, and how far from it by chance."""
    error = statistics.stdev(values) * math.sqrt(1 / len(SEEDS) + 1 / len(values))
    return statistics.mean(values), SIGMAS * error


@pytest.mark.long
@DTYPES
def test_a_method_moves_a_model_as_far_from_exact_training_as_with_other_seeds(dtype):
    mine, others = logs(dtype), logs_of_others(dtype)
    assert others.keys() == steps.METHODS.keys() and {len(values) for values in others.values()} == {20}
    for name, values in others.items():
        expected, room = mean_and_room(values)
        assert abs(statistics.mean(mine[name]) - expected) <= room, (name, mine[name])


@pytest.mark.long
@DTYPES
def test_the_task_tells_methods_apart(dtype):
    found = logs(dtype), logs_of_others(dtype)
    for finer, coarser in itertools.chain.from_iterable(map(itertools.pairwise, ORDERS[dtype])):
        mine, others = ([b - a for a, b in zip(of[finer], of[coarser], strict=True)] for of in found)
        expected, room = mean_and_room(others)
        assert expected - room > 0, "by the other seeds they are not told apart"
        assert statistics.mean(mine) >= expected - room, (finer, coarser)


@DTYPES
def test_a_slope_that_is_wrong_by_a_hundredth_moves_it_further(dtype, monkeypatch):
    monkeypatch.setattr("hf_memsave.ops.approximate.inverted.slope", lambda *args: PLANTED * slope(*args))
    exact, wrong = (steps.moved(steps.DTYPES[dtype], config, 0) for config in (None, steps.METHODS["invert"]))
    expected, room = mean_and_room(logs_of_others(dtype)["invert"])
    assert math.log(steps.share(wrong, exact)) > expected + room + math.log(5)
