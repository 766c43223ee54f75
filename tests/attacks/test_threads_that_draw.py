"""Two threads train with dropout by seed while a third draws: each backward has the mask of its own forward."""

from functools import partial

import pytest
import torch

from hf_memsave.tape import dropout
from support.script_helpers import load_script

SECONDS = 3


@pytest.fixture
def threads(monkeypatch):
    return load_script("threads", monkeypatch)


def test_masks_are_drawn_again_as_they_were(threads):
    found = threads.count(SECONDS)
    assert found.wrong == 0, found
    assert found.steps > 50 and found.draws > 1000, found


def test_a_state_that_is_read_before_another_thread_draws_is_seen(threads, monkeypatch):
    """Planted: the state is read in one step, and the mask is drawn from the shared generator in another."""

    def in_two_steps(tape, like, shape, p, is_scaled=True):
        state = torch.default_generator.get_state()
        torch.rand(1)  # of another thread
        noise = torch.empty_like(like, requires_grad=False).bernoulli_(1 - p).div_(1 - p)
        again = partial(
            dropout._redraw, shape=shape, stride=noise.stride(), dtype=noise.dtype, p=p, is_scaled=is_scaled
        )
        tape.record(noise, again, (state,))
        return noise

    monkeypatch.setattr(dropout, "_noise", in_two_steps)
    found = threads.count(0.5)
    assert found.wrong == found.steps > 0, found
