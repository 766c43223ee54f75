"""A device that is not there, with a clock: what the model computes, what is copied, and when; for copies' scheduler.

Four things go on at a time: the host, which gives work; the model's stream; and an engine of copies each way. Work on a
stream begins when it has been given, and what came before it is done. Copies are made as late as an event allows: one
that is read, written over or given away too early gives wrong numbers, or an error.
"""

import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef


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
