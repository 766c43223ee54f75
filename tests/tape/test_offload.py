"""Offload: what is kept lies in main memory, once, and the step is stock's to the bit."""

import contextlib
import gc
import threading
import weakref
from dataclasses import replace

import pytest
import torch

from hf_memsave import MemSaveConfig, MemSaveError, patch
from hf_memsave.errors import KeptTensorChangedError
from hf_memsave.tape import offload
from hf_memsave.tape.offload import Away, Offload, Queue
from support.attacks import Attack
from support.lora import adapted
from support.steps import assert_same, backward, patched
from support.tapes import held_tensors
from support.zoo import QUOTED, Size, batch_for, build, with_batch

FAMILIES = ("bert", "gpt2", "llama", "t5-decoder")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST_NBYTES", 256)
    gc.collect()
    assert Away.total == 0
    yield
    gc.collect()
    assert Away.total == 0


def step(model, batch):
    """Bytes that are away before backward, and the results."""
    torch.manual_seed(1)
    loss = model(**batch).loss
    return Away.total, backward(model, loss)


@pytest.mark.parametrize(("family", "has_lora"), [(f, f in ("gpt2", "llama")) for f in FAMILIES] + [("llama", False)])
def test_a_step_is_stocks_to_the_bit(family, has_lora):
    model = adapted(family, size=Size()) if has_lora else build(family, Size())
    batch = batch_for(model, Size(), padded=True)
    _, stock = step(model, batch)
    patch(model, MemSaveConfig(offload=True))
    seen = set()
    for _ in range(10 if family == "llama" else 2):
        away, ours = step(model, batch)
        assert_same(ours, stock)
        assert Away.total == 0
        seen.add(away)
    assert len(seen) == 1 and min(seen) > 0
    with torch.autograd.graph.save_on_cpu():  # a foreign hook has its own place
        away, ours = step(model, batch)
    assert away == 0
    assert_same(ours, stock)


#: In main memory GPT-2 has q, k and v beside the projection that they are parts of.
@pytest.mark.parametrize(("family", "floor"), [("bert", 10), ("gpt2", 11), ("llama", 10.5)])
def test_a_layer_leaves_next_to_nothing_on_the_device(family, floor):
    """What autograd holds that is no copy in main memory, and what is there: as much as the floor, once."""
    on_device, away = [], []
    for layers in (2, 4):
        size = replace(QUOTED, layers=layers)
        model, batch = with_batch(build(family, size), size)
        patch(model, MemSaveConfig(offload=True))
        gc.collect()
        before = live_bytes()
        loss = model(**batch).loss
        gc.collect()
        on_device.append(live_bytes() - before - Away.total)
        away.append(Away.total)
        del loss
    u = 2 * QUOTED.u(4)
    assert (on_device[1] - on_device[0]) / u <= 0.3
    assert (away[1] - away[0]) / u == pytest.approx(floor, rel=0.04)


def live_bytes():
    tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.layout is torch.strided]
    held = {}
    for tensor in tensors + held_tensors() + [o.host for o in gc.get_objects() if isinstance(o, Away)]:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def test_pinned_memory_is_taken_in_powers_of_two():
    for nbytes, pinned in ((0, 0), (1, 1), (2**16, 2**16), (2**16 + 1, 2**17), (3 * 2**20, 2**22)):
        assert offload._taken(nbytes, is_pinned=True) == pinned
        assert offload._taken(nbytes, is_pinned=False) == nbytes


def test_views_of_one_storage_are_copied_once_and_again_where_it_was_written_to():
    x = torch.randn(64, 64, requires_grad=True)
    h = x * 2
    with Offload():
        y = h.view(32, 128).sin().sum() + h.t().cos().sum() + (h * h).sum()
    assert Away.total == h.nbytes
    y.backward()
    torch.testing.assert_close(x.grad, 2 * (torch.cos(2 * x) - torch.sin(2 * x) + 4 * x))
    x.grad, h = None, x * 2
    with Offload():
        first = h.sin().sum()
        h = h.add_(1)
        second = h.cos().sum()
    (first + second).backward()
    torch.testing.assert_close(x.grad, 2 * (torch.cos(2 * x) - torch.sin(2 * x + 1)))


@pytest.mark.parametrize("kind", [torch.nn.LSTMCell, torch.nn.GRUCell, torch.nn.GRU])
def test_gates_that_are_chunks_of_one_storage_are_copied_each(kind):
    model, x, found = kind(8, 32), torch.randn(4, 16, 8), []
    for context in (contextlib.nullcontext(), Offload()):
        with context:
            out = model(x if kind is torch.nn.GRU else x[0])[0]
        found.append(backward(model, out.square().sum()))
    assert_same(*found)


def test_too_little_main_memory_is_an_error_with_a_remedy(monkeypatch):
    monkeypatch.setattr(offload, "SHARE", 1e-9)
    model = patched(build("llama", Size()), MemSaveConfig(offload=True))
    with pytest.raises(MemSaveError, match=r"expected room for .* in main memory, .* Use a smaller batch"):
        model(**batch_for(model, Size()))


class Stream:
    """Of a device that is not there, or an event of it: ``work`` ends at ``time``, and is done as late as it may be."""

    def __init__(self, host=None, time=0.0, work=None):
        self.host, self.time, self.work = host or self, time, work

    def wait_event(self, event):
        self.time, work, event.work = max(self.time, event.time), event.work, None
        if work is not None:
            work()

    wait_stream = wait_event

    def record_event(self, work=None):
        return Stream(self.host, self.time, work)

    def synchronize(self):
        self.host.wait_event(self)

    def query(self):
        return self.time <= self.host.time and self.synchronize() is None


class Clock(Queue):
    """As on CUDA: the host goes on unless it has to wait. What is let go of before its copy is done is a fault."""

    def __init__(self, bandwidth):
        super().__init__(torch.device("cpu"))
        self.host, self.bandwidth, self.copies, self.faults = Stream(), bandwidth, [], []
        self.model, self.out, self.into = (Stream(self.host) for _ in range(3))

    def compute(self, seconds):
        self.model.time = max(self.model.time, self.host.time) + seconds

    def now(self):
        return self.model

    def copy(self, source, target, stream):
        is_out = stream is self.out
        there, host = (source, target) if is_out else (target.fill_(255), source)
        stream.time = max(stream.time, self.host.time) + len(host) / self.bandwidth
        self.copies.append((is_out, int(source[0])))
        ref = weakref.ref(there, lambda ref: self.faults.append(event.time) if event.work else None)
        event = stream.record_event(lambda: host.copy_(ref()) if is_out else ref().data.copy_(host))
        return event


@pytest.fixture
def clock_of(monkeypatch):
    def make(bandwidth, in_flight):
        clocks.append(Clock(bandwidth))
        monkeypatch.setattr(offload, "IN_FLIGHT", in_flight)
        monkeypatch.setattr(offload, "queue_of", lambda device: clocks[0])
        return clocks[0]

    clocks = []
    yield make
    gc.collect()
    assert len(clocks[0].packed) == len(clocks[0].coming) == 0 and not clocks[0].faults


@pytest.fixture(params=[(1, 2**40), (3e8, 0), (1e12, 0)], ids=["a bus that stands still", "slow", "fast"])
def late(request, clock_of):
    return clock_of(*request.param)


@pytest.mark.parametrize(("bandwidth", "seconds"), [(500, 39), (1e6, 30)], ids=["slow", "fast"])
def test_copies_leave_first_in_first_out_and_come_back_in_reverse(bandwidth, seconds, clock_of):
    """Ten storages, each computed in 1 s and used for 2 s. The slow bus takes 2 s for a copy: in 21 s all are out."""
    clock, kept = clock_of(bandwidth, in_flight=4000), []
    for i in range(10):
        clock.compute(1)
        kept.append(Away(torch.full((1000,), i, dtype=torch.uint8)))
        assert sum(away.there is not None for away in kept) == min(i + 1, 4)
    while kept:
        assert kept[-1].back().eq(len(kept) - 1).all()
        assert sum(away.there is not None or away.coming is not None for away in kept) <= 5
        clock.compute(2)
        del kept[-1]
    assert clock.copies == [(True, i) for i in range(10)] + [(False, i) for i in reversed(range(6))]
    assert clock.model.time == pytest.approx(seconds, abs=0.1)


@pytest.mark.parametrize(("family", "rung"), [("llama", None), ("gpt2", None), ("llama", "block")])
def test_a_step_is_stocks_to_the_bit_however_late_copies_are(family, rung, late):
    model, batch = with_batch(build(family, Size()), Size(), padded=True)
    _, stock = step(model, batch)
    patch(model, MemSaveConfig(offload=True, checkpoint=rung))
    for module in model.modules():
        module.register_forward_hook(lambda *args: late.compute(1e-4))
    assert_same(step(model, batch)[1], stock)
    torch.manual_seed(1)
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    assert_same(backward(model, loss), stock)
    assert {is_out for is_out, _ in late.copies} == ({True, False} if late.bandwidth > 1 else {True})
    model(**batch)  # whose graph goes without a backward
    assert not late.faults


@pytest.mark.parametrize("how", [lambda h: h.add_(1), lambda h: h.data.mul_(2)], ids=["in place", "through .data"])
def test_what_the_forward_writes_to_is_copied_before(how, late):
    def writing(model, x):
        h = model.p * x
        first = h.sin()
        how(h)
        return first + h.exp()

    model = patched(Attack(writing, p=torch.nn.Parameter(torch.linspace(-1, 1, 4096))), MemSaveConfig(offload=True))
    model(torch.tensor(2.0)).sum().backward()
    h = model.p.detach() * 2
    expected = h.cos() * 2
    how(h)
    torch.testing.assert_close(model.p.grad, expected + h.exp() * 2)


def test_what_is_written_to_after_the_forward_is_an_error_as_in_stock_or_was_copied_before(late):
    kept = [torch.ones(1000) for _ in range(8)]
    away = [late.compute(1e-4) or Away(x) for x in kept]
    is_there = [one.there is not None for one in away]
    assert is_there == [late.bandwidth == 1] * 6 + is_there[6:] and is_there[-1]
    for x, one, is_early in zip(kept, away, is_there, strict=True):
        x.fill_(2)
        with pytest.raises(KeptTensorChangedError, match="inplace") if is_early else contextlib.nullcontext():
            assert one.back().view(torch.float32).eq(1).all()


def test_what_was_given_back_is_shared_until_its_storage_is_written_to(late):
    away = Away(x := torch.ones(1000))
    first = away.back()
    assert away.back() is first
    away.before_write()
    x.fill_(2)
    assert away.back().view(torch.float32).eq(1).all()


def test_a_finalizer_in_another_thread_waits_for_no_lock(late):
    kept = [Away(torch.ones(1000)) for _ in range(3)]
    with late.lock:
        thread = threading.Thread(target=kept.clear, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive() and len(late.packed) == 0
