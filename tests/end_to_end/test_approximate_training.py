"""Training with approximate gradients, in fp32 and bf16, on a task that tells the methods apart.

Bounds come from other seeds than those that are trained here: scripts/results/approximate-steps.json.
"""

import functools
import importlib
import itertools
import json
import math
import statistics

import pytest

from hf_memsave.ops.approximate.inverse import slope
from support.helpers import only_on_cpu
from support.script_helpers import BENCH, SCRIPTS
from support.slopes import PLANTED

SEEDS = range(4)
#: Standard deviations of a mean over :data:`SEEDS`, of which chance gives more once in two thousand times.
SIGMAS = 3.5
METHODS = ("norm output", "invert", "precision_bit", "few_bit 8", "int8", "int4", "few_bit 2", "few_bit 1")
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


@pytest.fixture
def steps(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("approximate_steps")


@functools.cache
def logs(dtype):
    """Of the distances of each method, by seed."""
    module = importlib.import_module("approximate_steps")
    found = [module.distances(module.DTYPES[dtype], seed)["exact"] for seed in SEEDS]
    return {name: [math.log(by_name[name]) for by_name in found] for name in METHODS}


@functools.cache
def logs_of_others(dtype):
    """The logarithms of the distances from the other seeds."""
    found = json.loads((SCRIPTS / "results" / "approximate-steps.json").read_text())[f"{dtype}, from exact"]
    return {name: [math.log(value) for value in values] for name, values in found.items()}


def mean_and_room(values):
    """What the mean over :data:`SEEDS` is expected to be, and how far from it by chance."""
    error = statistics.stdev(values) * math.sqrt(1 / len(SEEDS) + 1 / len(values))
    return statistics.mean(values), SIGMAS * error


def ratios(found, finer, coarser):
    return [b - a for a, b in zip(found[finer], found[coarser], strict=True)]


@pytest.mark.long
@DTYPES
@pytest.mark.parametrize("name", METHODS)
def test_a_method_moves_a_model_as_far_from_exact_training_as_with_other_seeds(name, dtype, steps, device):
    only_on_cpu(device, "the bits of exact training")
    expected, room = mean_and_room(logs_of_others(dtype)[name])
    assert abs(statistics.mean(logs(dtype)[name]) - expected) <= room, logs(dtype)[name]


@pytest.mark.parametrize(
    ("dtype", "finer", "coarser"),
    [(dtype, *pair) for dtype, chains in ORDERS.items() for chain in chains for pair in itertools.pairwise(chain)],
)
def test_the_task_tells_methods_apart(dtype, finer, coarser, steps, device):
    only_on_cpu(device, "the bits of exact training")
    expected, room = mean_and_room(ratios(logs_of_others(dtype), finer, coarser))
    assert expected - room > 0, "by the other seeds they are not told apart"
    assert statistics.mean(ratios(logs(dtype), finer, coarser)) >= expected - room


@DTYPES
def test_a_slope_that_is_wrong_by_a_hundredth_moves_it_further(dtype, steps, device, monkeypatch):
    only_on_cpu(device, "the bits of exact training")
    monkeypatch.setattr("hf_memsave.ops.approximate.inverted.slope", lambda *args: PLANTED * slope(*args))
    exact, wrong = (steps.moved(steps.DTYPES[dtype], config, 0) for config in (None, steps.METHODS["invert"]))
    expected, room = mean_and_room(logs_of_others(dtype)["invert"])
    assert math.log(steps.share(wrong, exact)) > expected + room + math.log(5)


def test_every_method_was_measured(steps):
    assert set(METHODS) == steps.METHODS.keys()
    for dtype in ORDERS:
        found = logs_of_others(dtype)
        assert found.keys() == steps.METHODS.keys()
        assert {len(values) for values in found.values()} == {20}
