"""When copies go and come: the code that CUDA's streams run, on a device that is not there, with a clock.

Four things go on at a time: the host, which gives work; the model's stream; and an engine of copies each way. Work on a
stream begins when it has been given, and what came before it is done. Copies are made as late as an event allows: one
that is read, written over or given away too early gives wrong numbers, or an error.
"""

import gc
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_memsave import MemSaveConfig, patch
from hf_memsave.errors import KeptTensorChangedError
from hf_memsave.tape import offload, transfers
from hf_memsave.tape.offload import Offload, main_memory
from hf_memsave.tape.transfers import Transfers
from support.attacks import Attack
from support.steps import assert_same, backward
from support.zoo import Size, batch_for, build


class Event:
    def __init__(self, lane, time, work=None):
        self.lane, self.time, self.work = lane, time, work

    def query(self):
        return self.lane.host >= self.time and self.happen()

    def synchronize(self):
        self.lane.host = max(self.lane.host, self.time)
        self.happen()

    def happen(self):
        if self.work is not None:
            self.work()
            self.work = None
        return True


class Clock:
    """The lane. ``is_ahead``: the host gives all work at once; else it gives the next when the last is done."""

    is_at_once = False

    def __init__(self, device, room, bandwidth=1e9, is_ahead=False):
        self.device, self.room, self.bandwidth, self.is_ahead = torch.device(device), room, bandwidth, is_ahead
        self.host = self.model = self.out = self.into = 0.0
        self.sent = self.fetched = self.most = 0
        self.storages, self.faults = [], []

    def compute(self, seconds):
        self.model = max(self.model, self.host) + seconds
        self.host = self.host if self.is_ahead else self.model

    def new(self, nbytes):
        """Memory of the device, of which the most there ever was is counted."""
        made = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.storages = [one for one in self.storages if not one[0].expired()]
        self.storages.append((StorageWeakRef(made.untyped_storage()), nbytes))
        self.most = max(self.most, sum(nbytes for _, nbytes in self.storages))
        return made

    def now(self):
        return None

    def mark(self):
        return Event(self, self.model)

    def send(self, there, made):
        host = self.room(len(there), self.device)
        self.sent += len(there)
        self.out = max(self.out, made.time, self.host) + len(there) / self.bandwidth
        return host, self._copying(self.out, there, lambda there: host.copy_(there))

    def fetch(self, host, left):
        there = self.new(len(host)).fill_(255)
        self.fetched += len(host)
        self.into = max(self.into, left.time, self.model, self.host) + len(host) / self.bandwidth

        def come(there):
            left.happen()
            there.data.copy_(host)

        return there, self._copying(self.into, there, come)

    def _copying(self, time, there, copy):
        """The event when memory of the device has been read or written; a fault if that is given away before."""

        def given_away(ref):
            self.faults += [time] * (event.work is not None)

        ref = weakref.ref(there, given_away)
        event = Event(self, time, lambda: self.device.type == "meta" or copy(ref()))
        return event

    def wait(self, event, stream):
        self.model = max(self.model, event.time)
        event.happen()

    def lend(self, there, event, home):
        self.wait(event, home)


LAYERS = 32
#: What a block of Llama-3-8B packs at the floor, in u, each after so many of the 13 parts of its products.
BLOCK = ((1, 3.5), (1, 1.5), (0.25, 0), (0.25, 0), (1, 0), (1, 1), (3.5, 7), (3.5, 0))
#: What its products and its attention read in backward, by number; and their parts.
READS = (((6, 7), 3.5), ((5,), 7), ((4,), 1), ((1, 2, 3, 4), 0), ((0,), 1.5))


def on_a_clock(monkeypatch, device, **how):
    lane = Clock(device, main_memory, **how)
    lane.transfers = Transfers(lane)
    monkeypatch.setitem(offload._transfers, lane.device, lane.transfers)
    return lane


def timeline(lane, forward, backward, u, block, reads):
    """Seconds of a step."""
    hooks, parts, layers = Offload(), sum(part for _, part in block), []
    for _ in range(LAYERS):
        layers.append([])
        for size, part in block:
            lane.compute(forward / LAYERS * part / parts)
            layers[-1].append(hooks.pack_hook(lane.new(int(size * u))))
    while layers:
        packed, read = layers.pop(), {}
        for asked, part in reads:
            for i in asked:
                if packed[i] is not None:  # a tape reads once what two functions have asked for
                    read[i], packed[i] = offload._unpack(packed[i]), None
            lane.compute(backward / LAYERS * part / parts)
            read = {i: there for i, there in read.items() if (i, asked) == (4, (4,))}
    assert lane.transfers.total == lane.transfers.held == 0
    return lane.model


@pytest.mark.parametrize("is_ahead", [False, True], ids=["host waits", "host is ahead"])
def test_the_timeline_of_llama_3_8b(is_ahead, monkeypatch):
    """A step of 168 ms takes 190 at most; two layers are on the device above what the bus has to leave there.

    The model: 32 layers, each of which keeps 4 + 2g + 2I = 11.5u at the floor (g = 1/4, I = 3.5), u = 2048 * 4096 * 2
    bytes: 193 MB a layer, 6.17 GB. A step computes for 168 ms, a third of it forward, and a layer's time goes to its
    products by their operations. The bus moves 50 GB/s each way, in order, both ways at once. The host gives the next
    work when the last is done, or all of it at once. Every storage on the device counts, until it can be used again.

    With 190 ms for the step and 112 for its backward the forward ends after 78, and until then the bus can have moved
    3.9 GB, whatever is copied when. The floor is what remains, 11.8 layers. To wait for all copies there would take
    124 + 124 ms, and to have two layers on the device at most, no less than 232.
    """
    monkeypatch.setattr(offload, "SHARE", 1e9)
    lane = on_a_clock(monkeypatch, "meta", bandwidth=50e9, is_ahead=is_ahead)
    u, layer = 2048 * 4096 * 2, 11.5 * 2048 * 4096 * 2
    assert timeline(lane, 0.056, 0.112, u, BLOCK, READS) <= 0.190
    floor = LAYERS * layer - (0.190 - 0.112) * 50e9
    assert lane.most <= floor + 2 * layer
    assert lane.fetched <= lane.sent <= 0.65 * LAYERS * layer


@pytest.mark.parametrize("is_ahead", [False, True], ids=["host waits", "host is ahead"])
def test_of_block_inputs_two_are_on_the_device_and_nothing_waits(is_ahead, monkeypatch):
    """128k tokens of that model, of which a block's input is kept, 1 GiB, in .3 s a block: the bus keeps up."""
    monkeypatch.setattr(offload, "SHARE", 1e9)
    lane = on_a_clock(monkeypatch, "meta", bandwidth=50e9, is_ahead=is_ahead)
    seconds = timeline(lane, LAYERS * 0.3, LAYERS * 0.9, 2**30, ((1, 1),), (((0,), 1),))
    assert lane.most == 2 * 2**30
    assert seconds <= LAYERS * 1.2 + 2**30 / 50e9


#: Seconds for a byte, against .1 ms a module, and the part that may be on the device: copies are under way for longer
#: than the step, waited for, or keep up.
BUSES = {"stands still": (1, 1), "slow": (3e-9, 0.4), "fast": (1e-12, 0.4)}


@pytest.fixture(params=BUSES)
def late(request, monkeypatch):
    """A CPU whose copies are made as late as they may be: a read, a write or a drop before that is seen."""
    monkeypatch.setattr(offload, "SMALLEST_NBYTES", 256)
    monkeypatch.setattr(transfers, "LEAST", 0)
    seconds, part = BUSES[request.param]
    monkeypatch.setattr(transfers, "HELD", part)
    lane = on_a_clock(monkeypatch, "cpu", bandwidth=1 / seconds)
    yield lane
    gc.collect()
    assert lane.transfers.total == lane.transfers.held == offload.Away.total == 0
    assert not lane.faults


def stepped(model, batch, again=False):
    torch.manual_seed(1)
    loss = model(**batch).loss
    if again:
        loss.backward(retain_graph=True)
    return backward(model, loss)


@pytest.mark.parametrize(("family", "fields"), [("llama", {}), ("gpt2", {}), ("llama", {"checkpoint": "block"})])
def test_a_step_is_stocks_to_the_bit_however_late_copies_are(family, fields, late):
    model = build(family, Size())
    batch = batch_for(model, Size(), padded=True)
    stock = stepped(model, batch)
    patch(model, MemSaveConfig(offload=True, **fields))
    for module in model.modules():
        module.register_forward_hook(lambda *args: late.compute(1e-4))
    for again in (False, True, False):
        assert_same(stepped(model, batch, again), stock)
    assert (late.fetched > 0) == (late.bandwidth > 1)
    assert late.sent > 0 and not late.faults
    held = model(**batch)  # whose graph goes without a backward
    assert late.transfers.total > 0
    del held


@pytest.mark.parametrize("how", [lambda h: h.add_(1), lambda h: h.data.mul_(2)], ids=["in place", "through .data"])
def test_what_the_forward_writes_to_is_copied_before(how, late):
    def writing(model, x):
        h = model.p * x
        first = h.sin()
        how(h)
        return first + h.exp()

    model = Attack(writing, p=torch.nn.Parameter(torch.linspace(-1, 1, 4096).view(64, 64)))
    x = torch.linspace(-2, 2, 64)
    patch(model, MemSaveConfig(offload=True))
    model(x).sum().backward()
    h = model.p.detach() * x
    expected = h.cos() * x
    how(h)
    torch.testing.assert_close(model.p.grad, expected + h.exp() * x)


def test_what_is_written_to_after_the_forward_is_an_error_as_in_stock_or_was_copied_before(late):
    p, losses = torch.linspace(-1, 1, 4096, requires_grad=True), []
    with Offload():
        kept = [p * 2 for _ in range(8)]
        for h in kept:
            losses.append(h.sin().sum())
            late.compute(1e-4)
    with torch.no_grad():
        kept[0].add_(1)
        kept[-1].add_(1)
    is_gone = late.bandwidth > 1
    if is_gone:
        torch.testing.assert_close(torch.autograd.grad(losses[0], p)[0], 2 * torch.cos(2 * p.detach()))
    for loss in losses[-1:] if is_gone else (losses[0], losses[-1]):
        with pytest.raises(KeptTensorChangedError, match="modified by an inplace operation"):
            loss.backward()
