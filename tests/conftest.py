"""What every test shares: the device, a seed, and one thread (tensors are small), or TEST_THREADS."""

import gc
import logging
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hf_memsave.errors import MeasureError
from hf_memsave.measure.private import why_not
from support.helpers import CLAIM_ON_GPU, EARLIER, fix_kernels, nodes

#: Why a test may be skipped where the environment has CI. Any other skip is a failure there: what can be installed is.
MAY_BE_SKIPPED = re.compile(
    "does not apply|(?<!stand-in for a )CUDA|process without GPUs|on CPU|CPU kernels|of the CPU|there is a device"
    "|only the interpreter|TRITON_INTERPRET=1|kernels run|it has streams|no SIGKILL"
    "|needs the official files|needs BERT's vocabulary|needs /.*MRPC"
    "|version of PEFT you are using"  # Transformers 5.24's add_adapter wants one that is not out
)

#: Cases of a test that the first part of the tests has.
FIRST = 3


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-case", action="store_true", help="of every test its first case")
    parser.addoption("--of-a-file", type=int, metavar="N", help="the first N tests of every file")
    about = "three cases, spread evenly, of every test that is not long; or all that this leaves out"
    parser.addoption("--part", choices=("first", "rest"), help=about)


def pytest_configure() -> None:
    torch.set_num_threads(int(os.environ.get("TEST_THREADS", 1)))
    os.environ["COLUMNS"] = "80"  # tables, and those of processes, have the width they have without a terminal
    os.environ.pop("FORCE_COLOR", None)


def failed_where_skipped(report: pytest.TestReport | pytest.CollectReport):
    """The report; a failure in CI, where it is of a test that something installable would run."""
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not MAY_BE_SKIPPED.search(reason):
            report.outcome, report.longrepr = "failed", f"{reason}\nA skip is no pass in CI: install what it needs."
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return failed_where_skipped((yield))


pytest_make_collect_report = pytest_runtest_makereport


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    files: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        tests = files.setdefault(item.nodeid.partition("::")[0], {})
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    cases = 1 if config.getoption("--one-case") else None
    tests_of_files = (list(tests.values())[: config.getoption("--of-a-file")] for tests in files.values())
    chosen = {item: None for tests in tests_of_files for test in tests for item in test[:cases]}
    if (part := config.getoption("--part")) is not None:
        every = (test for tests in files.values() for test in tests.values())
        short = [[item for item in test if item.get_closest_marker("long") is None] for test in every]
        first = {test[number * len(test) // FIRST] for test in short if test for number in range(FIRST)}
        chosen = {item: None for item in chosen if (item in first) == (part == "first")}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # the meter looks at every object of the process: spare it those of the libraries


@pytest.fixture(scope="module", autouse=True)
def without_objects_of_other_files() -> None:
    """As above, for what tests have imported and cached since: in a whole run a meter took five times as long."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Any:
    """Skip what opens the stand-in for a CUDA device where that cannot be, or adapters of an older PEFT."""
    try:
        return (yield)
    except (MeasureError, ValueError) as error:
        if str(error) != why_not() and not str(error).startswith("The version of PEFT you are using is not compatible"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """CUDA where there is one: the same tests run there."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    levels = {name: logging.getLogger(name).level for name in ("transformers", "hf_memsave")}
    yield
    for name, level in levels.items():  # which the command line, or a test, has changed
        logging.getLogger(name).setLevel(level)
    if os.environ.get(CLAIM_ON_GPU):
        fix_kernels(False)


@pytest.fixture(autouse=True)
def without_nodes_of_other_tests(request) -> None:
    """Where a test counts nodes: save_on_cpu without a backward, on CPU, never lets go of a graph."""
    if hasattr(request.module, "nodes"):
        EARLIER.update(nodes())
