"""What tests of reports share."""

import logging
import warnings

import pytest


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
