"""What every test shares: the device, a seed, and one thread (the tensors are small, and sums the same everywhere)."""

import gc

import pytest
import torch

from support.helpers import EARLIER, nodes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", type=int, metavar="N", help="a case of the first N tests of each file; none marked long"
    )


def pytest_configure() -> None:
    torch.set_num_threads(1)


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (most := config.getoption("--quick")) is None:
        return
    first: dict[str, dict[str, pytest.Item]] = {}  # file -> test -> its first case
    for item in items:
        tests = first.setdefault(item.nodeid.partition("::")[0], {})
        if item.get_closest_marker("long") is None and len(tests) < most:
            tests.setdefault(item.nodeid.partition("[")[0], item)
    chosen = [item for tests in first.values() for item in tests.values()]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


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


@pytest.fixture(scope="session")
def device() -> torch.device:
    """CUDA where there is one: the same tests run there."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def without_nodes_of_other_tests(request) -> None:
    """Where a test counts nodes: save_on_cpu without a backward, on CPU, never lets go of a graph."""
    if hasattr(request.module, "nodes"):
        EARLIER.update(nodes())
