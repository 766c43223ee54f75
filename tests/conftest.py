"""What every test shares: the device, a seed, and one thread (the tensors are small, and sums the same everywhere)."""

import gc

import pytest
import torch


def pytest_configure() -> None:
    torch.set_num_threads(1)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # the meter looks at every object of the process: spare it those of the libraries


def pytest_unconfigure():
    gc.unfreeze()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """CUDA where there is one: the same tests run there."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
