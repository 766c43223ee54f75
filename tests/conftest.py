"""What every test shares: the device, and small models of every family with random weights."""

import pytest
import torch


def pytest_configure():
    torch.set_num_threads(min(2, torch.get_num_threads()))  # the same sums on every machine


@pytest.fixture(scope="session")
def device() -> torch.device:
    """CUDA where there is one: the same tests run there."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
