"""What one CUDA stream made and another one reads is written by then, and its memory not given away before.

Asked of streams that are not there, by clocks. Work on one stream runs in order; of two streams nothing is known unless
one waited for the other. A read is right if the write comes before it by that order. A tensor's memory goes back to the
stream that it was allocated on as soon as the program lets go of it. So that stream has waited for every other one that
reads it or writes to it, or these were named by ``record_stream``. What needs a GPU: that autograd runs each function
of backward on the stream of its forward, pinned memory, and what kernels do.
"""

import gc
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import cache

import pytest
import torch

from hf_memsave.tape import offload
from hf_memsave.tape.offload import Away, Queue
from support.tapes import HANDLES, OnDemand


class Stream:
    """In order by itself; ``clock`` says up to which work of each stream this one, or the host, has waited."""

    def __init__(self, name):
        self.name, self.clock = name, Counter()

    def work(self):
        self.clock[self] += 1

    def comes_after(self, other, when):
        return max(self.clock[other], Event.seen[other]) >= when

    def wait_stream(self, other):
        self.clock |= other.clock

    def record_event(self, event=None):
        return Event(self.clock)

    def wait_event(self, event):
        self.clock |= event


class Event(Counter):
    """Of which the host knows nothing unless it waits; what it has seen is done before all that it gives later."""

    seen = Counter()

    def query(self):
        return False

    def synchronize(self):
        Event.seen |= self


class Streams:
    def __init__(self):
        self.now, self.faults = Stream("default"), []

    def current(self, device=None):
        return self.now

    @contextmanager
    def on(self, stream):
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before


class Memory:
    """As much of a CUDA tensor as matters: on which stream it was allocated, who wrote it and who reads it."""

    is_cuda, is_cpu, is_device, device = True, False, True, torch.device("cuda", 0)

    def __init__(self, streams):
        self.streams, self.home = streams, streams.now
        self.recorded, self.reads = set(), []
        self._version = 0
        self.written = self.home, 0
        if self.is_device:  # what was in it before
            self.write()

    def __len__(self):
        return 1024

    def detach(self):
        return self

    def write(self):
        """A kernel of the current stream writes to it; an error if another stream may still use what was there."""
        stream = self.streams.now
        for other, when in (*self.reads, self.written):
            assert stream.comes_after(other, when), f"{stream.name} writes to what {other.name} may still use"
        stream.work()
        self.written = stream, stream.clock[stream]

    def read(self):
        """A kernel of the current stream reads it; an error if it may not be written yet."""
        stream, (writer, when) = self.streams.now, self.written
        assert stream.comes_after(writer, when), f"{stream.name} reads what {writer.name} may not have written"
        stream.work()
        self.reads.append((stream, stream.clock[stream]))

    def record_stream(self, stream):
        self.recorded.add(stream)

    def copy_(self, other, non_blocking=False):
        other.read()
        self.write()

    def __del__(self):
        """The program holds it no more; a fault if a stream may use it when its memory is another tensor's."""
        if self.is_device:
            users = [*self.reads, self.written]
            late = [s.name for s, when in users if s not in self.recorded and not self.home.comes_after(s, when)]
            self.streams.faults += [f"{name} may use memory that was given away" for name in late]


class Host(Memory):
    """Pinned memory, which its allocator keeps until copies are done."""

    is_device = False


@pytest.fixture
def streams():
    return Streams()


class Made(OnDemand):
    """Remade for three that ask, on the stream of the first."""

    def __init__(self, streams):
        super().__init__(nullcontext())
        self.streams, self.made, self.uses = streams, [], 3

    def _made(self):
        self.made.append(Memory(self.streams))
        return self.made[-1]


@pytest.fixture
def in_backward(streams, monkeypatch):
    monkeypatch.setattr(HANDLES, "backward_id", lambda: 1)
    monkeypatch.setattr(HANDLES, "after_backward", lambda call: None)
    monkeypatch.setattr(HANDLES, "current_stream", streams.current)


def ask_from_three(shared, streams):
    for name in ("first", "second", "third"):
        with streams.on(Stream(name)):
            shared.get().read()
    assert len(shared.made) == 1
    assert shared.shared.out is None
    shared.made.clear()
    assert not streams.faults, streams.faults


def test_what_is_remade_is_shared_across_streams_until_it_is_written_to(streams, in_backward):
    ask_from_three(Made(streams), streams)
    shared = Made(streams)
    with streams.on(Stream("first")):
        shared.get()._version += 1
    with streams.on(Stream("second")):
        shared.get().read()
    assert [memory.home.name for memory in shared.made] == ["first", "second"]


#: What is forgotten of a stream or of memory, and what says so.
FAULTS = [
    (Stream, "wait_stream", "may not have written"),
    (Stream, "wait_event", "may not have written"),
    (Memory, "record_stream", "was given away"),
]


@pytest.mark.parametrize(("owner", "name", "message"), FAULTS[::2])
def test_a_stream_that_is_forgotten_is_seen(owner, name, message, streams, in_backward, monkeypatch):
    monkeypatch.setattr(owner, name, lambda *args: None)
    with pytest.raises(AssertionError, match=message):
        ask_from_three(Made(streams), streams)


@pytest.fixture
def copies(streams, monkeypatch):
    """A device that has a stream each way for copies, and room for two on their way."""
    monkeypatch.setattr(offload, "queue_of", cache(Queue))
    monkeypatch.setattr(offload, "_bytes", lambda tensor: tensor)
    monkeypatch.setattr(offload, "main_memory", lambda nbytes, device: Host(streams))
    monkeypatch.setattr(offload, "IN_FLIGHT", 0)
    monkeypatch.setattr(torch.cuda, "current_stream", streams.current)
    monkeypatch.setattr(torch.cuda, "stream", streams.on)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("copies"))
    monkeypatch.setattr(torch.cuda, "Event", lambda **how: None)
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: Memory(streams))


def there_and_back(streams, *askers):
    """Some tensors of a forward go away, all but one come back for all askers; then all is let go."""
    away = [Away(Memory(streams)) for _ in range(6)]
    while len(away) > 1:
        one, held = away.pop(), None
        for asker in askers:
            with streams.on(asker):
                assert held in (None, one.back())
                held = one.back()
                held.read()
        del one, held
    away.clear()
    gc.collect()
    assert not streams.faults, streams.faults


def test_what_is_away_comes_back_in_order_and_is_shared_across_streams(streams, copies):
    there_and_back(streams, streams.now)
    there_and_back(streams, streams.now, Stream("second"), Stream("third"))


@pytest.mark.parametrize(("owner", "name", "message"), [(Stream, "wait_stream", "may still use"), *FAULTS[1:]])
def test_an_order_that_is_forgotten_is_seen(owner, name, message, streams, copies, monkeypatch):
    monkeypatch.setattr(owner, name, lambda *args: None)
    with pytest.raises(AssertionError, match=message):
        there_and_back(streams, streams.now, Stream("second"))


def test_a_write_after_packing_waits_for_the_copy(streams, copies):
    kept = Memory(streams)
    away = Away(kept)
    with pytest.raises(AssertionError, match="may still use"):
        kept.write()
    away.before_write()
    kept.write()
    assert away.host
