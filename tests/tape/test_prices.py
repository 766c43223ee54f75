"""What the tape keeps of what it might: the fewest new bytes, for a bounded time in backward."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_memsave import patch
from hf_memsave.tape import Tape
from hf_memsave.tape.frame import Frame
from support.attacks import WIDTH, Attack, assert_trains_like_stock, trained
from support.helpers import assert_same_bits, kept, nodes, random, taping
from support.tapes import MOST_WORK, SPAN, is_remade

SHAPE = (8, 40)


@pytest.fixture
def a(device):
    return random(*SHAPE, device=device)


@pytest.mark.parametrize("others_first", [True, False])
def test_a_tensor_is_remade_of_two_that_are_kept_and_else_kept_itself(a, others_first):
    b = random(*SHAPE, device=a.device, seed=1)
    with taping() as tape:
        assert not is_remade(tape.pack(a + b))
        of_a = tape.pack(a)
        assert is_remade(tape.pack(a.sin() * a.cos())) and not is_remade(of_a), "of one kept, and one that is remade"
    handles = {}
    with taping() as tape:
        y = a + b
        for name in "aby" if others_first else "yab":
            handles[name] = tape.pack({"a": a, "b": b, "y": y}[name])
        ref, expected = StorageWeakRef(y.untyped_storage()), y.clone()
        del y
    assert is_remade(handles["y"]) and not is_remade(handles["a"])
    assert ref.expired()
    assert_same_bits(handles["y"].get(), expected)


def test_the_narrower_of_a_tensor_and_its_source_is_kept_and_what_a_tape_is_called_with_costs_nothing(device, a):
    low = random(*SHAPE, dtype=torch.bfloat16, device=device)
    with taping() as tape:
        assert not is_remade(tape.pack(a.bfloat16()))
        assert is_remade(tape.pack(low.float()))
    with taping(inputs=[a]) as tape:
        assert is_remade(tape.pack(a.sin()))
    with taping() as tape:
        assert not is_remade(tape.pack(a.sin()))


def test_one_source_is_kept_for_all_that_is_made_of_it(device):
    x = random(*SHAPE, dtype=torch.bfloat16, device=device).requires_grad_()

    def fn(x):
        wide = torch.ops.aten.clone(x).float()
        return sum(torch.ops.aten.mul(y, y).bfloat16() for y in (wide * 2, wide.exp() * 1, wide + 1))

    factors = 2 * 8  # which autograd keeps as float64 tensors
    assert kept(fn, x, tape=True, linear=False) == x.nbytes + factors
    part = kept(lambda x: torch.ops.aten.sin(x[:4].neg()), x.float(), tape=True, linear=False)
    assert part == 4 * SHAPE[1] * 4, "a part is kept where the whole is not needed"


def test_a_matrix_costs_nothing_to_convert_and_a_vector_a_copy(device):
    matrix, vector = nn.Parameter(random(64, 40, device=device)), nn.Parameter(random(40, device=device))
    with taping() as tape:
        low, wide = tape.pack(matrix.bfloat16()), tape.pack(vector.repeat(64, 1))
    expected = vector.detach().repeat(64, 1)
    vector.data.zero_()  # as optimizers do
    assert is_remade(low) and is_remade(wide)
    assert_same_bits(low.get(), matrix.bfloat16())
    assert_same_bits(wide.get(), expected)


def test_a_parameter_that_changes_after_its_block_is_as_it_was(a):
    """A kept tensor may give way to its sources later: not to what optimizers write to, or FSDP2 has freed."""
    vector = nn.Parameter(random(SHAPE[1], device=a.device), requires_grad=False)
    with taping() as tape:
        y = a * vector
        handle = tape.pack(y)
        of_source = tape.pack(a)  # noqa: F841
        tape.end_block()
        vector.data.zero_()
    assert_same_bits(handle.get(), y)


def test_a_tensor_whose_keeper_died_is_not_kept_for_others(a):
    """A branch that no gradient goes through: ``h.sigmoid() > 0.5``."""
    with taping() as tape:
        h = torch.ops.aten.clone(a).requires_grad_()
        torch.ops.aten.sigmoid(h)  # keeps its result
        s = h * 2
        torch.ops.aten.square(s)  # keeps s
        mask = s > 0.5
        handle = tape.pack(mask)
    assert not is_remade(handle)


def test_a_kept_tensor_holds_nothing_that_it_was_made_of(a):
    with taping() as tape:
        left, right = torch.ops.aten.clone(a), torch.ops.aten.clone(a)[:1]
        refs = [StorageWeakRef(t.untyped_storage()) for t in (left, right)]
        of_left = tape.pack(left)
        y = left + right
        handle = tape.pack(y)
    del left, right, of_left
    assert all(ref.expired() for ref in refs)
    assert_same_bits(handle.get(), y)


def test_no_tensor_takes_more_than_so_many_functions_in_a_row_or_side_by_side(a):
    with taping(inputs=[a]) as tape:
        x, handles = a, []
        for _ in range(4 * MOST_WORK):
            x = torch.sin(x)
            handles.append(tape.pack(x))
    assert max(node.work for node in nodes()) <= MOST_WORK
    assert sum(not is_remade(handle) for handle in handles) <= 8
    assert_same_bits(handles[-1].get(), x)
    with taping(inputs=[a]) as tape:  # side by side
        terms = [torch.sin(a + number) for number in range(MOST_WORK)]
        while len(terms) > 1:
            terms = [x + y for x, y in zip(terms[::2], terms[1::2], strict=True)]
        assert not is_remade(tape.pack(terms[0]))


def test_no_tensor_is_remade_from_many_blocks_back(device):
    """A residual sum in fp32 of branches in bf16, as under autocast: each is made again a few times at most."""
    x, calls, blocks = random(*SHAPE, device=device).requires_grad_(), [], 24

    def add(x, y):
        calls.append(1)
        return torch.add(x, y)

    with Tape(Frame({}), inputs=[x]) as tape:
        for _ in range(blocks):
            branch = torch.ops.aten._to_copy(torch.ops.aten.sin(x.detach()), dtype=torch.bfloat16).requires_grad_()
            y = torch.ops.aten.mul(branch, branch)  # keeps the branch
            total = add(x, y)
            tape.record(total, add, (x, y))
            x = total
            z = torch.ops.aten.square(x)  # keeps the sum
            tape.end_block(x)
    assert max(node.work for node in nodes()) <= 2 * SPAN + 2
    calls.clear()
    (x + z).sum().backward()
    assert len(calls) <= 3 * blocks


def smoothed(steps):
    def fn(model, x):
        x = model.f(x)
        for _ in range(steps):
            x = 0.5 * x + 0.25 * (x.roll(1, 1) + x.roll(-1, 1))
        return model.g(torch.tanh(x))

    return fn


def test_a_tensor_used_three_times_a_step_takes_no_exponential_time(device):
    x, seconds = random(2, 16, WIDTH, device=device), []
    for steps in (6, 24):
        model = Attack(smoothed(steps)).to(device)
        patch(model)
        start = time.perf_counter()
        trained(model, x)
        seconds.append(time.perf_counter() - start)
    assert seconds[1] < 60 * seconds[0]  # at 2.4 times a step it would take 7 million times as long
    assert_trains_like_stock(smoothed(12), x)


def test_a_sum_of_many_terms(device):
    def fn(model, x):
        x = model.f(x)
        total = torch.zeros((), device=x.device)
        for i in range(1200):  # more than Python nests calls
            total = total + x[:, i % 16].mean() * 0.01
        return model.g(x) * torch.sqrt(1 + total * total)

    assert_trains_like_stock(fn, random(2, 16, WIDTH, device=device))


@pytest.mark.parametrize("is_forward", [True, False])
def test_backward_under_autocast_remakes_what_was_made_without_and_the_other_way_round(device, is_forward):
    x, w = random(4, 8, device=device), random(64, 8, device=device)
    weight = random(4, 64, device=device).requires_grad_()
    with torch.autocast(device.type, torch.bfloat16, enabled=is_forward), taping(inputs=[x, w]) as tape:
        y = F.linear(x, w)  # thin: such a product may run again
        assert is_remade(handle := tape.pack(y))
        z = (y * weight).sum()
    with torch.autocast(device.type, torch.bfloat16, enabled=not is_forward):
        z.backward()
        assert_same_bits(handle.get(), y)
    assert_same_bits(weight.grad, y.float())
