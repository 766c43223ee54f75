"""Offload: what is kept lies in main memory, once, and the step is stock's to the bit."""

import contextlib
import gc
from dataclasses import replace

import pytest
import torch

from hf_memsave import MemSaveConfig, MemSaveError, patch
from hf_memsave.tape import offload
from hf_memsave.tape.offload import Away, Offload
from support.lora import adapted
from support.steps import assert_same, backward
from support.tapes import held_tensors
from support.zoo import QUOTED, Size, batch_for, build

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
        model = build(family, size)
        batch = batch_for(model, size)
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
    """Of every storage that is alive."""
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
    model = build("llama", Size())
    patch(model, MemSaveConfig(offload=True))
    with pytest.raises(MemSaveError, match=r"expected room for .* in main memory, .* Use a smaller batch"):
        model(**batch_for(model, Size()))
