"""Which samples a batch has: by their column of indices, or by what they contain."""

import pytest
import torch

from hf_memsave import WTACRS, ConfigError
from hf_memsave.sampling.sampler import Sampler
from support.helpers import random


def ids_of(lengths, left=False, width=20):
    rows = []
    for sample, length in enumerate(lengths):
        words = random(length, seed=sample).abs().mul(1000).long() + 5
        pads = torch.zeros(width - length, dtype=torch.long)
        rows.append(torch.cat([pads, words] if left else [words, pads]))
    ids = torch.stack(rows)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def test_a_samples_slot_is_that_of_its_content_whatever_the_padding():
    sampler = Sampler(WTACRS(cache="content", samples=2**40))
    lengths = (20, 5, 17, 8)
    slots = sampler._samples(ids_of(lengths))
    assert slots.unique().numel() == len(lengths) and (slots >= 0).all()
    for width, left in ((20, True), (33, False), (64, True)):
        assert torch.equal(sampler._samples(ids_of(lengths, left, width)), slots), (width, left)
    swapped = ids_of(lengths)
    swapped["input_ids"][:, :2] = swapped["input_ids"][:, :2].flip(1)
    assert not (sampler._samples(swapped) == slots).any()


def test_content_needs_token_ids():
    with pytest.raises(ConfigError, match=r"'content'\) expected input_ids .* got NoneType. Use cache='position'"):
        Sampler(WTACRS(cache="content"))._samples({"inputs_embeds": torch.zeros(2, 3, 4)})


@pytest.mark.parametrize("index", [None, 3, torch.zeros(2, 2).long(), torch.zeros(2)], ids=str)
def test_a_missing_column_of_indices_is_asked_for(index):
    with pytest.raises(ConfigError, match=r"column 'sample_idx', a whole number a sample, got .*dataset.add_column"):
        Sampler(WTACRS(cache="sample_idx", samples=16))._samples({"sample_idx": index})


@pytest.mark.parametrize("index", [[0, 16], [-1, 3]])
def test_an_index_out_of_range_is_refused(index):
    with pytest.raises(ConfigError, match=rf"numbers from 0 to 15, got {min(index)} to {max(index)}. Set WTACRS"):
        Sampler(WTACRS(cache="sample_idx", samples=16))._samples({"sample_idx": torch.tensor(index)})
