"""CUDA streams that are not there: who may read what, and when memory may be given away, checked by clocks.

Work on one stream runs in order; of two streams nothing is known unless one waited for the other. A read is right if
the write comes before it by that order. A tensor's memory goes back to the stream that it was allocated on as soon as
the program lets go of it, so every other stream that reads it must have been named by ``record_stream``.
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

    def record_event(self):
        return Counter(self.clock)

    def wait_event(self, event):
        self.clock |= event


class Streams:
    def __init__(self):
        self.now = Stream("default")

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

    is_cuda, is_cpu, device = True, False, torch.device("cuda", 0)

    def __init__(self, streams):
        self.streams, self.home = streams, streams.now
        self.readers, self.recorded, self.reads = set(), set(), []
        self._version = 0
        self.write()

    def __len__(self):
        return 1024

    def write(self):
        """A kernel of the current stream writes to it; an error if another stream may still read what was there."""
        stream = self.streams.now
        for reader, when in self.reads:
            assert stream.clock[reader] >= when, f"{stream.name} writes to what {reader.name} may still read"
        stream.work()
        self.written = stream, stream.clock[stream]

    def read(self):
        """A kernel of the current stream reads it; an error if it may not be written yet."""
        stream, (writer, when) = self.streams.now, self.written
        assert stream.clock[writer] >= when, f"{stream.name} reads what {writer.name} may not have written"
        stream.work()
        self.readers.add(stream)
        self.reads.append((stream, stream.clock[stream]))

    def record_stream(self, stream):
        self.recorded.add(stream)

    def copy_(self, other, non_blocking=False):
        other.read()
        self.write()

    def to(self, device, non_blocking=False):
        self.read()
        return Memory(self.streams)

    def let_go(self):
        """The program holds it no more; an error if a stream may read it when its memory is another tensor's."""
        unknown = {stream.name for stream in self.readers - {self.home} - self.recorded}
        assert not unknown, f"{', '.join(unknown)} may read memory that was given away"
