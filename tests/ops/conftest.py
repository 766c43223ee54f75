"""What tests of the chunked loss share, and those of fused linears."""

from collections import Counter

import pytest

from hf_memsave.ops.fused import joint, low_parameters
from hf_memsave.ops.loss import chunked_loss
from support.accuracy import SMALL


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK", SMALL)
    monkeypatch.setattr(chunked_loss, "TILE", 1)  # and so on a device
    monkeypatch.setattr(chunked_loss, "ROWS", 1)


@pytest.fixture
def made(monkeypatch):
    """How many parameters each conversion made, and how many products were ours."""
    found, copy_each = Counter(), low_parameters.copy_each

    def counting(low, high):
        found[len(low)] += 1
        copy_each(low, high)

    monkeypatch.setattr(low_parameters, "copy_each", counting)
    return found


@pytest.fixture
def added(monkeypatch):
    """Of every gradient that a fused function offered to a joint, whether it was added there."""
    found, sum_for = [], joint.Joint.sum_for

    def asked(*args):
        one = sum_for(*args)
        found.append(one is not None)
        return one

    monkeypatch.setattr(joint.Joint, "sum_for", asked)
    return found
