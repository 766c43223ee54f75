"""Two threads train with dropout by seed while a third draws: each has its own numbers, backward those of forward.

Both draw from the one generator of the process, so no step can be compared with a step of stock. Instead, each dropout
notes the mask that its forward applied, and each backward is compared with the gradients that this mask gives. The
third thread must not be given the same numbers twice.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_memsave import patch
from hf_memsave.tape import dropout
from support.helpers import DTYPES, LAYOUTS, assert_exact, kept, random, taping
from support.threads import switching

#: Numbers in a mask: enough for a draw to take longer than a thread's turn.
ROWS, WIDTH = 64, 64
#: Draws among which one is looked for again.
RECENT = 10_000
by_seed = partial(taping, dropout="seed")


@pytest.fixture
def verdicts(monkeypatch):
    """What each dropout found of the state that it had read: whether the mask came from it."""
    check, found = dropout._begins_at, []
    monkeypatch.setattr(dropout, "_begins_at", lambda *args: (found.append(check(*args)), found[-1])[1])
    return found


@pytest.fixture
def drawn_between(monkeypatch):
    """Another thread's draw falls between the reading of the state and the mask's."""
    make = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: (torch.rand(1), make(*args, **kwargs))[1])


def in_threads(*calls):
    """What each gives; they change places all the time."""
    with switching(1e-6), ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


class Net(nn.Module):
    """Dropout of ones gives its mask away: of its input only the mask is left."""

    def __init__(self):
        super().__init__()
        self.scale, self.seen = nn.Parameter(torch.ones(WIDTH)), []

    def forward(self, x):
        """Two dropouts, each between functions that keep nothing of it."""
        for _ in range(2):
            x = F.dropout(x * self.scale, 0.3)
            self.seen.append((x.detach() != 0).clone())
            x = x.sin() + 2
        return x


def expected(net, x):
    scale = net.scale.detach().clone().requires_grad_()
    for mask in net.seen:
        x = ((x * scale) * mask.to(x.dtype).div_(1 - 0.3)).sin() + 2
    return torch.autograd.grad(x.sum(), scale)[0]


def test_masks_are_drawn_again_as_they_were_and_no_thread_is_given_the_numbers_of_before(verdicts):
    end = time.monotonic() + 1.5

    def train():
        net, x, found = Net(), torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)) + 0.5, []
        patch(net, {"dropout": "seed"})
        while time.monotonic() < end:
            net.zero_grad(set_to_none=True)
            net.seen.clear()
            net(x).sum().backward()
            found.append(torch.equal(net.scale.grad, expected(net, x)))
        return found

    def draw():
        recent, draws = {}, 0
        while time.monotonic() < end:
            drawn = tuple(torch.rand(4, dtype=torch.float64).tolist())
            assert drawn not in recent
            draws, recent[drawn] = draws + 1, None
            if len(recent) > RECENT:
                del recent[next(iter(recent))]
        return draws

    first, second, draws = in_threads(train, train, draw)
    assert all(first + second)
    assert len(first + second) > 50 and draws > 1000
    assert not all(verdicts) and any(verdicts), "no thread drew between a state and its mask"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_draw_in_between_costs_no_exactness_and_keeps_one_bit_an_element(dtype, drawn_between, verdicts):
    x = random(30, 50, 9, dtype=dtype)
    for fn, p in product((F.dropout, F.alpha_dropout), (1e-6, 0.01, 0.5, 0.9)):

        def stock(x, fn=fn, p=p):
            torch.rand(1)
            return fn(x, p, True)

        assert_exact(lambda x: fn(x, p, True), stock, [x], by_seed)  # noqa: B023
    assert kept(partial(F.dropout, p=0.1), x, tape=by_seed, producer=torch.sigmoid) == x.nbytes + -(-x.numel() // 8)
    del verdicts[:]
    for view, p in product(LAYOUTS.values(), (0.01, 0.5, 0.99)):
        with by_seed():
            F.dropout(view(random(400, 500, 8).to(dtype).requires_grad_()), p)
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
                with by_seed():
                    F.dropout(x, p)
    finally:
        torch.set_num_threads(before)
    assert verdicts and all(verdicts)


def test_threads_take_turns_at_the_generator_that_a_kernel_draws_from():
    """Two that train with the kernel of dropout that CUDA has: it draws from the default generator."""
    end = time.monotonic() + 0.7

    def train():
        found = []
        while time.monotonic() < end:
            x, weight = (torch.ones(64, 64, requires_grad=True) for _ in "xw")
            with taping(inputs=[x]) as tape:
                y = dropout._fused(tape, x, 0.3)
                (y * weight).sum().backward()
            found.append(torch.equal(weight.grad, y))
        return found

    first, second = in_threads(train, train)
    assert len(first + second) > 100 and all(first + second)
