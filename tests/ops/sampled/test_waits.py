"""What the host waits for in a step of a sampled model: nothing of the step before."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_memsave import WTACRS, ConfigError, MemSaveConfig, patch
from hf_memsave import device as devices
from hf_memsave.ops.sampled import batch as batches
from hf_memsave.ops.sampled import norm_cache
from hf_memsave.ops.sampled import sampler as samplers
from hf_memsave.ops.sampled.batch import Tokens
from hf_memsave.ops.sampled.sampler import Sampler
from support.fake import NoTransfers, on_fake
from support.helpers import on_stand_in
from support.zoo import QUOTED, build

CACHES = {
    "position": WTACRS(targets=("0", "1")),
    "content": WTACRS(targets=("0", "1"), cache="content"),
    "sample_idx": WTACRS(targets=("0", "1"), cache="sample_idx", samples=64),
    "none": WTACRS(targets=("0", "1"), cache=None),
}


@pytest.fixture
def sent(monkeypatch):
    """Every device has numbers, and the host waits for them: what was sent to it, and what has been read there."""
    found = {"sent": 0, "read": 0}

    def later(x):
        found["sent"] += 1
        number = x if x.device.type == "cpu" else np.ones(x.shape)
        return lambda: found.update(read=found["read"] + 1) or number

    for module in (batches, norm_cache, samplers):
        monkeypatch.setattr(module, "has_numbers", lambda x: True)
    for module in (batches, devices, samplers):
        monkeypatch.setattr(module, "tells_later", lambda x: True)
    monkeypatch.setattr(devices, "later", later)
    return found


@pytest.mark.long
@on_stand_in
@pytest.mark.parametrize(
    ("family", "cache", "padded"),
    [*zip(["bert"] * 4, CACHES, [False, True] * 2, strict=True), ("t5-decoder", "sample_idx", True)],
)
def test_a_step_waits_for_nothing_of_the_one_before(family, cache, padded, sent):
    with on_fake(lambda: build(family, QUOTED, torch.bfloat16), padded=padded) as (model, batch):
        patch(model, MemSaveConfig(linear=CACHES[cache]))
        index = {"sample_idx": torch.zeros(QUOTED.batch, dtype=torch.long, device=batch["input_ids"].device)}
        batch |= index if cache == "sample_idx" else {}
        before = 0
        for _ in range(3):
            with NoTransfers():
                model(**batch).loss.backward()
            assert sent["read"] == before, "what a step asks for is read in the next one"
            before = sent["sent"]
    assert before > 0 or (cache in ("position", "none") and not padded)


def masks(*lengths, seq=10):
    return (torch.arange(seq) < torch.tensor(lengths)[:, None]).long()


def test_where_no_host_waits_the_tokens_of_this_batch_are_counted():
    sampler = Sampler(WTACRS())
    for lengths in ((2, 8), (10, 3)):
        batch = sampler._begin({"attention_mask": masks(*lengths), "decoder_attention_mask": masks(4, seq=5)})
        assert (batch.own.real, batch.decoder.real) == (sum(lengths), 4)


def test_a_draw_has_the_size_that_the_largest_share_of_earlier_forwards_gives(sent):
    sampler, found = Sampler(WTACRS()), []
    for own, decoder in (((2, 8), (1,)), ((10, 6), (2,)), ((5, 5, 5, 5), (5,)), ((1, 1), (1,))):
        batch = sampler._begin({"attention_mask": masks(*own), "decoder_attention_mask": masks(*decoder, seq=5)})
        found.append((batch.own.real, batch.decoder.real))
    assert found == [(20, 5), (10, 1), (32, 2), (16, 5)]
    for _ in range(8):
        batch = sampler._begin({"attention_mask": masks(1, 1)})
    assert (batch.own.real, batch.decoder) == (2, None)


def test_an_empty_batch_says_nothing_and_labels_tell_of_a_decoder_without_a_mask(sent):
    sampler, labels = Sampler(WTACRS()), torch.tensor([[3, 4, -100, -100]])
    for _ in range(2):
        assert sampler._begin({"attention_mask": masks(5, 5)[:0]}).own.real == 0
    assert not any(sampler.shares.values())
    assert [sampler._begin({"labels": labels}).decoder.real for _ in range(2)] == [4, 2]


def test_a_block_that_is_given_a_mask_takes_the_share_of_the_batch():
    outside = batches.Batch(0, Tokens(masks(2, 3) > 0, 0.25), Tokens(masks(1, seq=5) > 0, 0.5))
    hidden = torch.zeros(2, 10, 4)
    inside = samplers._within(outside, {"encoder_hidden_states": hidden, "encoder_attention_mask": masks(2, 3)})
    assert (inside.other.share, inside.own.share) == (0.25, 0.5)
    inside = samplers._within(outside, {"encoder_hidden_states": hidden, "attention_mask": masks(2, 3)})
    assert inside.own.share == 0.5, "it is the decoder's, though it has the encoder's shape"
    inside = samplers._within(replace(outside, own=None), {"attention_mask": masks(2, 3)})
    assert inside.own.share == 1


@pytest.mark.parametrize("again", [copy.deepcopy, lambda sampler: pickle.loads(pickle.dumps(sampler)), None])
def test_a_run_that_goes_on_draws_as_many(again, sent):
    first = Sampler(WTACRS())
    first._begin({"attention_mask": masks(2, 8)})
    second = Sampler(WTACRS()) if again is None else again(first)
    if again is None:
        second.load_state_dict(first.state_dict(), torch.device("cpu"))
    reals = [sampler._begin({"attention_mask": masks(1, 1)}).own.real for sampler in (first, second)]
    assert reals == [10, 10]


def test_a_wrong_index_is_told_a_step_later(sent):
    sampler = Sampler(WTACRS(cache="sample_idx", samples=8))
    batch = sampler._begin({"sample_idx": torch.tensor([3, 8])})
    assert batch.samples.max() < 8, "the table would be read beyond its end"
    with pytest.raises(ConfigError, match="numbers from 0 to 7, got 3 to 8"):
        sampler._begin({"sample_idx": torch.tensor([3, 4])})
    assert sampler._begin({"sample_idx": torch.tensor([3, 4])}).samples.tolist() == [3, 4]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_a_number_comes_later():
    x = torch.arange(5, device="cuda")
    get = devices.later(x * 2)
    x.fill_(9)
    assert get().tolist() == [0, 2, 4, 6, 8]
