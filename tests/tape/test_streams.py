"""What one CUDA stream made and another one reads is written by then, and its memory not given away before.

Asked of streams that are not there. What needs a GPU: that autograd runs each function of backward on the stream of its
forward, pinned memory, and what kernels do.
"""

import weakref
from contextlib import nullcontext

import pytest
import torch

from hf_memsave import MemSaveConfig, patch
from hf_memsave.tape import offload
from hf_memsave.tape.offload import Away
from support.streams import Memory, Stream, Streams
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
    shared.made[0].let_go()


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
    """The stream that copies to main memory and back."""
    copies = Stream("copies")
    empty = torch.empty
    monkeypatch.setattr(offload, "_stream", lambda device: copies)
    monkeypatch.setattr(offload, "_bytes", lambda tensor: tensor)
    monkeypatch.setattr(offload, "_refuse_too_much", lambda nbytes: None)
    monkeypatch.setattr(torch.cuda, "current_stream", streams.current)
    monkeypatch.setattr(torch.cuda, "stream", streams.on)
    is_host = lambda kwargs: kwargs.pop("pin_memory", False)  # noqa: E731
    monkeypatch.setattr(torch, "empty", lambda *a, **k: Memory(streams) if is_host(k) else empty(*a, **k))
    return copies


def there_and_back(streams, *askers):
    """Three tensors of a forward go away, the last two come back for all askers; then all is let go."""
    kept = [Memory(streams) for _ in range(3)]
    away, before = [], None
    for tensor in kept:
        away.append(Away(tensor, before))
        before = weakref.ref(away[-1])
        tensor.let_go()
    got = []
    for one in away[:0:-1]:
        held = None
        for asker in askers:
            with streams.on(asker):
                assert held in (None, one.back())
                held = one.back()
                held.read()
        got.append(held)
    for memory in got:
        memory.let_go()


def test_what_is_away_comes_back_in_order_and_is_shared_across_streams(streams, copies):
    there_and_back(streams, streams.now)
    there_and_back(streams, streams.now, Stream("second"), Stream("third"))


@pytest.mark.parametrize(("owner", "name", "message"), FAULTS)
def test_an_order_that_is_forgotten_is_seen(owner, name, message, streams, copies, monkeypatch):
    monkeypatch.setattr(owner, name, lambda *args: None)
    with pytest.raises(AssertionError, match=message):
        there_and_back(streams, streams.now)


def test_a_write_after_packing_waits_for_the_copy_and_after_the_forward_for_all_copies(streams, copies, monkeypatch):
    kept = Memory(streams)
    away = Away(kept, None)
    with pytest.raises(AssertionError, match="may still read"):
        kept.write()
    away.before_write()
    kept.write()
    monkeypatch.setattr(offload, "_streams", {Memory.device: copies})
    kept = Memory(streams)
    with offload.Offload():
        away = Away(kept, None)
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
