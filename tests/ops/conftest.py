"""What tests of the chunked loss share."""

import pytest

from hf_memsave.ops import chunked_loss
from support.accuracy import SMALL


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK", SMALL)
