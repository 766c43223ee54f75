"""Two threads train with dropout by seed while a third draws: each has its own numbers, backward those of forward."""

import threading
import time
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from hf_memsave.tape import dropout
from support import threads as engine
from support.helpers import DTYPES, LAYOUTS, assert_exact, kept, random, taping

SECONDS = 1.5


@pytest.fixture(autouse=True)
def by_seed(monkeypatch):
    monkeypatch.setattr(dropout, "_is_kept_in_bits", lambda *_: False)


@pytest.fixture
def threads():
    return engine


@pytest.fixture
def verdicts(monkeypatch):
    """What each dropout found of the state that it had read: whether the mask came from it."""
    found = []
    check = dropout._begins_at
    monkeypatch.setattr(dropout, "_begins_at", lambda *args: (found.append(check(*args)), found[-1])[1])
    return found


@pytest.fixture
def drawn_between(monkeypatch):
    """Another thread's draw falls between the reading of the state and the mask's."""
    make = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: (torch.rand(1), make(*args, **kwargs))[1])


def test_masks_are_drawn_again_as_they_were_and_no_thread_is_given_the_numbers_of_before(threads, verdicts):
    found = threads.count(SECONDS)
    assert found.wrong == found.again == 0, found
    assert found.steps > 50 and found.draws > 1000, found
    assert not all(verdicts) and any(verdicts), "no thread drew between a state and its mask"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_draw_in_between_costs_no_exactness_and_keeps_one_bit_an_element(dtype, drawn_between, verdicts):
    x = random(30, 50, 9, dtype=dtype)
    for fn, p in product((F.dropout, F.alpha_dropout), (1e-6, 0.01, 0.5, 0.9)):

        def stock(x, fn=fn, p=p):
            torch.rand(1)
            return fn(x, p, True)

        assert_exact(lambda x: fn(x, p, True), stock, [x])  # noqa: B023
    assert kept(partial(F.dropout, p=0.1), x, tape=True, producer=torch.sigmoid) == x.nbytes + -(-x.numel() // 8)
    del verdicts[:]
    for view, p in product(LAYOUTS.values(), (0.01, 0.5, 0.99)):
        with taping():
            F.dropout(view(random(80, 50, 8).to(dtype).requires_grad_()), p)
    assert verdicts == [False] * 12


@pytest.mark.parametrize("threads_of_torch", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_draw_in_between_is_noticed_too(dtype, threads_of_torch, verdicts):
    """A mask's first elements are those of a smaller draw: of every size, layout and share of kept elements."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads_of_torch)
    try:
        for shape, view in product(((1, 1, 1), (3, 5, 7), (40, 20, 1), (89, 9, 1), (50, 60, 10)), LAYOUTS.values()):
            x = view(random(*shape, dtype=dtype).requires_grad_())
            for p in (1e-6, 0.1, 0.9):
                with taping():
                    F.dropout(x, p)
    finally:
        torch.set_num_threads(before)
    assert verdicts and all(verdicts)


def wrong_steps_of_fused(threads):
    """Of two threads that train with the kernel of dropout that CUDA has: it draws from the default generator."""
    found = []

    def train():
        end = time.monotonic() + 0.7
        while time.monotonic() < end:
            x, weight = (torch.ones(64, 64, requires_grad=True) for _ in "xw")
            with taping(inputs=[x]) as tape:
                y = dropout._fused(tape, x, 0.3)
                (y * weight).sum().backward()
            found.append(torch.equal(weight.grad, y))

    workers = [threading.Thread(target=train) for _ in range(2)]
    with threads.switching(1e-6):
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert len(found) > 100
    return found.count(False)


def test_threads_take_turns_at_the_generator_that_a_kernel_draws_from(threads):
    assert wrong_steps_of_fused(threads) == 0
