"""What these tests share: a model, and what is said."""

import logging
import warnings

import pytest
import torch
from torch._dynamo.utils import counters

from support.compiled import no_codegen as no_codegen
from support.helpers import only_on_cpu
from support.zoo import build


@pytest.fixture
def afresh(device):
    """Nothing is compiled yet."""
    only_on_cpu(device)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def llama(device):
    return build("llama").to(device)


@pytest.fixture
def said(caplog):
    """Every warning so far, logged or raised as such, that has ``part`` in it."""
    logger = logging.getLogger("transformers")
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.WARNING):
        warnings.simplefilter("always")
        logger.addHandler(caplog.handler)

        def messages(part="hf_memsave"):
            found = [record.getMessage() for record in caplog.records] + [str(w.message) for w in caught]
            return [message for message in found if part in message]

        yield messages
        logger.removeHandler(caplog.handler)
