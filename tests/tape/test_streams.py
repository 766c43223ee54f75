"""What one CUDA stream made and another one reads is written by then, and its memory not given away before.

Asked of streams that are not there. What needs a GPU: that autograd runs each function of backward on the stream of its
forward, pinned memory, and what kernels do.
"""

import gc
from contextlib import nullcontext

import pytest
import torch

from hf_memsave import MemSaveConfig, patch
from hf_memsave.tape import offload, transfers
from hf_memsave.tape.offload import Away
from support.streams import Host, Memory, Stream, Streams
from support.tapes import HANDLES, OnDemand


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
    assert shared.out is None
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
    """A device that has a stream each way for copies, and no room for two."""
    monkeypatch.setattr(offload, "_transfers", {})
    monkeypatch.setattr(offload, "_bytes", lambda tensor: tensor)
    monkeypatch.setattr(offload, "main_memory", lambda nbytes, device: Host(streams))
    monkeypatch.setattr(transfers, "LEAST", 0)
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


def test_a_tape_tells_a_copy_of_the_writes_that_it_sees(monkeypatch):
    told = []
    monkeypatch.setattr(Away, "before_write", lambda away: told.append(away.host.clone().view(torch.float32)))

    class Writes(torch.nn.Linear):
        def forward(self, x):
            y = x * 2
            z = super().forward(y)
            y.add_(1)
            return z

    model = Writes(160, 4)
    patch(model, MemSaveConfig(offload=True))
    x = torch.randn(128, 160)
    model(x)
    assert len(told) == 1
    assert torch.equal(told[0], 2 * x.view(-1))
