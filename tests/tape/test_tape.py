"""The tape: what is remade, when it dies, and who may ask. What is written to meanwhile: ``test_writes.py``."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_memsave.tape import Tape, current
from hf_memsave.tape.frame import Frame
from support.helpers import GoesBack, assert_same_bits, random, taping
from support.tapes import of_ones
from support.threads import in_threads


class Counter:
    """A function that counts how often it ran, and knows what it made."""

    def __init__(self, fn=torch.sin):
        self.fn, self.made = fn, []

    def __call__(self, *inputs):
        y = self.fn(*inputs)
        self.made.append(ref_of(y))
        return y


def recorded(tape, fn, *inputs):
    """As a handler of the table does."""
    y = fn(*inputs)
    tape.record(y, fn, inputs)
    return y


def is_alive(ref):
    gc.collect()
    return not ref.expired()


def ref_of(tensor):
    return StorageWeakRef(tensor.untyped_storage())


def test_a_tensor_that_is_remade_is_freed_and_what_was_made_without_a_tape_is_kept(x, weight):
    before = torch.sin(x)
    with taping():
        a = torch.sin(x)
        b = torch.exp(a)  # made of what is remade
        freed, kept = [ref_of(a), ref_of(b)], ref_of(before)
        z = (b @ weight).sum() + (before @ weight).sum()
    del a, b, before
    assert not any(map(is_alive, freed)) and is_alive(kept)
    z.backward()
    assert_same_bits(weight.grad, of_ones(torch.exp(torch.sin(x))) + of_ones(torch.sin(x)))


def test_one_call_serves_all_consumers_of_a_backward(x, weight):
    fn = Counter()
    with Tape(Frame({}), inputs=[x]) as tape:
        y = recorded(tape, fn, x)
        z = sum((y @ weight).sum() for _ in range(3))
    z.backward()
    assert len(fn.made) == 2


def test_a_record_dies_with_its_tensor_and_holds_nothing_once_its_tape_ended(device):
    with taping():
        x, w = random(4, 20, device=device), random(4, 20, device=device)
        refs = [ref_of(x), ref_of(w)]
        y, v = torch.cos(x), torch.cos(w)
        del x, w
        assert all(map(is_alive, refs))
        del y
        assert [is_alive(ref) for ref in refs] == [False, True]
    assert not is_alive(refs[1]) and v.shape == (4, 20)


def test_a_new_tensor_at_an_old_address_is_not_mistaken_for_the_old_one(device):
    reused = 0
    for size in (1 << 8, 1 << 10, 1 << 14, 1 << 18):  # allocators differ in which one they use again
        x, w = random(size, device=device), torch.ones(size, device=device, requires_grad=True)
        for step in range(100):
            with taping(inputs=[x]):
                y = torch.sin(x)
                address = y.data_ptr()
                del y
                fresh = torch.empty_like(x).fill_(float(step))
                reused += fresh.data_ptr() == address
                z = (fresh * w).sum()
            (dw,) = torch.autograd.grad(z, w)
            assert torch.equal(dw, torch.full_like(w, float(step)))
    assert reused, "the allocator never reused an address: the test tested nothing"


def test_a_view_in_another_dtype_is_kept(device):
    w = random(4, 20, dtype=torch.float16, device=device).requires_grad_()
    x = random(4, 20, dtype=torch.bfloat16, device=device)
    with taping(inputs=[x]):
        y = x * 2
        z = (y.view(torch.float16) * w).sum()
    z.backward()
    assert_same_bits(w.grad, y.view(torch.float16))


@pytest.mark.parametrize("consumers", [1, 2])
def test_what_was_remade_dies_with_its_last_consumer_and_is_not_held_for_one_that_never_asks(x, consumers):
    weights = [random(20, 20, device=x.device, seed=seed).requires_grad_() for seed in range(2)][:consumers]
    fn, alive = Counter(), []
    with Tape(Frame({})) as tape:
        h = GoesBack.apply(x, lambda dy: alive.append(not fn.made[1].expired()) or dy)
        y = recorded(tape, fn, h)
        z = sum((y @ weight).sum() for weight in weights)
    del y
    z.backward(retain_graph=True)  # else it dies with the graph of its consumers
    assert alive == [False] and len(fn.made) == 2
    torch.autograd.grad(z, weights[0], retain_graph=True)
    assert len(fn.made) == 3 and not is_alive(fn.made[2])


def test_each_thread_has_its_own_tape_and_backward_may_run_on_another(x, weight):
    seen = []
    with taping():
        in_threads(lambda: seen.append(current()))
        z = (torch.sin(x) @ weight).sum()
    assert seen == [None]
    in_threads(z.backward)
    assert_same_bits(weight.grad, of_ones(torch.sin(x)))


def test_threads_that_ask_for_one_tensor_at_once_get_it(x):
    with taping(inputs=[x]) as tape:
        y = torch.sin(x)
        handles = [tape.pack(y) for _ in range(64)]
        assert tape.pack(x).get() is x, "what is kept is held as it is"
    got = []
    in_threads(*[lambda h=h: got.append(h.get()) for h in handles])
    assert len(got) == 64
    for tensor in got:
        assert_same_bits(tensor, torch.sin(x))
