"""How often the host waits for a device in a forward of a sampled model: not once a layer."""

import pytest
import torch

from hf_memsave import WTACRS, MemSaveConfig, patch
from hf_memsave.measure.private import data_errors
from hf_memsave.sampling import batch as batches
from hf_memsave.sampling.batch import Batch, Tokens
from hf_memsave.sampling.norm_cache import NormCache
from hf_memsave.sampling.sampler import Sampler
from support.fake import NoTransfers, on_fake
from support.families import QUOTED, build

LAYERS = [f"layer.{i}" for i in range(4)]
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")


@pytest.fixture
def copies(monkeypatch):
    """Tensors that were copied to the host."""
    found, cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: found.append(tensor) or cpu(tensor))
    return found


@on_cpu
@pytest.mark.parametrize("padded", [False, True], ids=["all real", "padded"])
def test_a_step_asks_for_the_number_of_real_tokens_and_nothing_else(padded, monkeypatch):
    asked = []
    monkeypatch.setattr(batches, "has_numbers", lambda x: asked.append(x) is not None)
    with on_fake(lambda: build("bert", QUOTED, torch.bfloat16), padded=padded) as (model, batch):
        patch(model, MemSaveConfig(linear=WTACRS()))
        with NoTransfers():
            model(**batch).loss.backward()
    assert len(asked) == padded  # once for all layers


@on_cpu
def test_a_device_without_numbers_tells_of_the_question(monkeypatch):
    monkeypatch.setattr(batches, "has_numbers", lambda x: True)
    with on_fake(lambda: build("bert", QUOTED, torch.bfloat16), padded=True) as (model, batch):
        patch(model, MemSaveConfig(linear=WTACRS()))
        with pytest.raises((*data_errors(), RuntimeError)):
            model(**batch)


def learned(cache, tokens):
    for layer in LAYERS:
        cache.know(layer)
        cache.update(layer, Batch(0, tokens, samples=torch.arange(2)), tokens, torch.rand(2, 3) + 0.1)


def test_what_all_layers_found_of_samples_is_one_copy(copies):
    cache, tokens = NormCache("sample_idx", 2), Tokens(torch.ones(2, 3) > 0)
    learned(cache, tokens)
    cache.flush()
    assert len(copies) == 1
    assert (cache._table > 0).all()


def test_the_layers_with_pads_are_one_copy(copies):
    cache, tokens = NormCache("position", 0), Tokens(torch.tensor([[True, True, False], [True, True, True]]))
    learned(cache, tokens)
    assert cache.layers_with_pads() == LAYERS
    assert len(copies) == 1


@pytest.mark.parametrize("masked", [False, True])
def test_samples_are_told_apart_by_one_copy(copies, masked):
    sampler = Sampler(WTACRS(cache="content"))
    ids = torch.randint(9, (2, 5))
    padded = {"attention_mask": torch.ones(2, 5).long()} if masked else {}
    batch = sampler._begin({"input_ids": ids, **padded})
    assert len(copies) == 1
    assert batch.samples.shape == (2,)


def test_what_is_known_of_samples_is_sent_without_waiting(monkeypatch):
    cache, tokens = NormCache("sample_idx", 2), Tokens(torch.ones(2, 3) > 0)
    learned(cache, tokens)
    cache.flush()
    sent, to = [], torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *args, **how: sent.append((args, how)) or to(x, *args, **how))
    assert cache.predict(LAYERS[0], Batch(1, tokens, samples=torch.arange(2)), tokens) is not None
    assert [how for args, how in sent if args and isinstance(args[0], torch.device)] == [{"non_blocking": True}]
