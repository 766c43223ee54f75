"""What tests of the tape share."""

import pytest

from support.helpers import random
from support.tapes import composed, tapes  # noqa: F401 - fixtures


@pytest.fixture
def x(device):
    return random(4, 20, device=device).requires_grad_()


@pytest.fixture
def weight(device):
    return random(20, 20, device=device, seed=1).requires_grad_()
