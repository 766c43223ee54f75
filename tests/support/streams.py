"""CUDA streams that are not there: who may read what, and when memory may be given away, checked by clocks.

Work on one stream runs in order; of two streams nothing is known unless one waited for the other. A read is right if
the write comes before it by that order. A tensor's memory goes back to the stream that it was allocated on as soon as
the program lets go of it. So that stream has waited for every other one that reads it or writes to it, or these were
named by ``record_stream``.
"""

import contextlib
from collections import Counter

import torch


class Stream:
    """In order by itself; ``clock`` says up to which work of each stream this one has waited."""

    def __init__(self, name):
        self.name, self.clock = name, Counter()

    def work(self):
        self.clock[self] += 1

    def wait_stream(self, other):
        self.clock |= other.clock

    def record_event(self, event=None):
        return Event(self.clock)

    def wait_event(self, event):
        self.clock |= event


class Event(Counter):
    """Of which the host knows nothing unless it waits."""

    def query(self):
        return False

    def synchronize(self):
        pass


class Streams:
    def __init__(self):
        self.now, self.faults = Stream("default"), []

    def current(self, device=None):
        return self.now

    @contextlib.contextmanager
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
            assert stream.clock[other] >= when, f"{stream.name} writes to what {other.name} may still use"
        stream.work()
        self.written = stream, stream.clock[stream]

    def read(self):
        """A kernel of the current stream reads it; an error if it may not be written yet."""
        stream, (writer, when) = self.streams.now, self.written
        assert stream.clock[writer] >= when, f"{stream.name} reads what {writer.name} may not have written"
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
            late = [s.name for s, when in users if s not in self.recorded and self.home.clock[s] < when]
            self.streams.faults += [f"{name} may use memory that was given away" for name in late]


class Host(Memory):
    """Pinned memory, which its allocator keeps until copies are done."""

    is_device = False
