"""``count_peak`` on known sequences of allocations, and the peak of whole steps, patched over stock."""

import contextlib
import gc

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from hf_memsave.count.peak import count_peak

ROWS, WIDTH = 64, 32
FP32 = 4
UNIT = ROWS * WIDTH * FP32


@pytest.fixture
def x(device):
    return torch.randn(ROWS, WIDTH, device=device)


def units(step):
    """The peak and what is left at the end, in tensors like ``x``."""
    found = count_peak(step)
    return found.peak / UNIT, found.end / UNIT


def test_a_known_sequence_is_counted_exactly(x):
    def step():
        a = x + 1
        b = a + 1
        del a
        c, d = b + 1, b + 2
        del b, c
        d.sum()

    found = count_peak(step)
    assert found.timeline == (
        *(("aten.add.Tensor", live * UNIT) for live in (1, 2, 2, 3)),
        ("aten.sum.default", UNIT + FP32),
    )
    assert (found.peak, found.end) == (3 * UNIT, 0)


def keeping(made):
    leak = []
    return lambda x: leak.append(made(x))


def views_of(view):
    def step(x):
        a = x.clone()
        return view(a), view(a), view(view(a))

    return step


def cycles(x):
    for _ in range(3):
        cycle = [x + 1]
        cycle.append(cycle)


class Wasteful(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        return sum([ctx.x + i for i in range(5)])


#: The peak, and what is left at the end, in tensors like ``x``.
SIMPLE = {
    "a leak": (keeping(lambda x: x + 1), 1, 1),
    "a view of a leak": (keeping(lambda x: [x + 1, (x + 2)[:1]]), 2, 2),
    "a number of a leak": (keeping(lambda x: (x + 1)[0, :1]), 1, 1),
    "what is returned": (lambda x: {"loss": (x + 1).exp().exp()}, 2, 0),  # an op's input and output are alive together
    "a slice": (views_of(lambda a: a[1:]), 1, 0),
    "a transposed view": (views_of(torch.t), 1, 0),
    "a detached view": (views_of(torch.detach), 1, 0),
    "a write in place": (views_of(torch.relu_), 1, 0),
    "a flat view": (views_of(lambda a: a.view(-1)), 1, 0),
    "a wrapper": (lambda x: TwoTensor(x, x.clone()) + 1, 3, 0),  # counts as what it is made of
    "a tensor made from numbers": (keeping(lambda x: torch.tensor([1.0, 2.0])), 2 * FP32 / UNIT, 2 * FP32 / UNIT),
    # Five at once; sum() then has its old and its new result beside them.
    "what backward makes": (lambda x: Wasteful.apply(x.requires_grad_()).backward(), pytest.approx(7, abs=0.01), 1),
    "cycles": (cycles, 3, 0),  # to the end of the step
    "an op that resizes": (lambda x: (x + 1).resize_(2 * ROWS, WIDTH), 2, 0),
    "an output that is resized": (lambda x: torch.add(x, 1, out=x.new_empty(0)), 1, 0),
}


@pytest.mark.parametrize(("step", "peak", "end"), SIMPLE.values(), ids=SIMPLE)
def test_of_each_storage_its_bytes_count_once_while_it_is_alive(x, step, peak, end):
    assert units(lambda: step(x)) == (peak, end)


def test_what_autograd_keeps_counts_until_its_backward(x):
    def step():
        y = x.requires_grad_().exp()  # keeps its output
        loss = y.sum()
        del y
        loss.backward()

    # exp's output and its gradient; that of the sum is expanded from one number.
    found = count_peak(step)
    assert found.end == UNIT
    assert 2 * UNIT <= found.peak <= 2 * UNIT + 2 * FP32


def test_gradients_are_what_is_left_and_those_from_before_do_not_count(device, x):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1)).to(device)

    step = lambda: model(x).sum().backward()  # noqa: E731
    assert count_peak(step).end == sum(p.nbytes for p in model.parameters())
    again = count_peak(step)
    assert again.end == 0 and again == count_peak(step)
    with torch.autocast(device.type, torch.bfloat16):  # a cast of a weight counts, though autocast has it
        assert count_peak(lambda: model(x)).timeline == count_peak(lambda: model(x)).timeline


def test_a_storage_emptied_and_filled_again_counts_what_it_has(x):
    lives = []

    def step():
        a = x + 1
        a.untyped_storage().resize_(0)
        lives.append(x + 1)
        a.untyped_storage().resize_(UNIT)
        a.fill_(0)

    found = count_peak(step)
    assert [live / UNIT for _, live in found.timeline] == [1, 1, 2]
    assert found.end == UNIT


def test_storages_from_before_neither_count_nor_are_subtracted_but_for_their_growth(x):
    before, storage = [x + 1, x + 2], x.untyped_storage()

    def step():
        a = before.pop() * 2
        before.clear()
        return a * 2

    assert units(step) == (2, 0)

    def resize():
        storage.resize_(0)
        storage.resize_(UNIT)
        x.zero_()
        storage.resize_(3 * UNIT)
        storage.resize_(UNIT)

    assert units(resize) == (2, 0)


@pytest.mark.parametrize("is_broken", [False, True], ids=["returns", "raises"])
def test_resizing_and_the_collector_are_as_they_were(x, is_broken):
    stock = torch.UntypedStorage.resize_

    def step():
        assert torch.UntypedStorage.resize_ is not stock
        assert not gc.isenabled()
        if is_broken:
            raise ZeroDivisionError
        return x + 1

    with pytest.raises(ZeroDivisionError) if is_broken else contextlib.nullcontext():
        count_peak(step)
    assert torch.UntypedStorage.resize_ is stock
    assert "resize_" not in vars(torch.UntypedStorage)
    assert gc.isenabled()
