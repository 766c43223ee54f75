"""The cache of gradient norms: whatever is in it, the expected weight of every row stays 1; and what it learns.

Nor have 20,000 draws a bias: their mean error is what chance makes it, in every dtype.
"""

import math

import pytest
import torch

from hf_memsave import WTACRS, ConfigError
from hf_memsave.ops.sampled.batch import Batch, Tokens
from hf_memsave.ops.sampled.norm_cache import NONZERO, RATE, UNSEEN, ZERO, NormCache
from hf_memsave.ops.sampled.sampler import Sampler
from support.draws import Watched, expected_weights, standard_errors
from support.helpers import random
from support.pairs import pairwise

BATCH, SEQ, IN, OUT = 4, 8, 6, 5
LAYER = "layers.0.q"
CACHES = {
    "position": WTACRS(minimum=1), "sample_idx": WTACRS(minimum=1, cache="sample_idx", samples=16),
    "content": WTACRS(minimum=1, cache="content", samples=64), "none": WTACRS(minimum=1, cache=None),
}  # fmt: skip


def right_padded(device, lengths=(8, 5, 3, 6)):
    return Tokens(torch.arange(SEQ, device=device) < torch.tensor(lengths, device=device)[:, None])


def gradients(device, tokens, seed=0, pads=0.0):
    """Squared norms ``[batch, seq]``, with ``pads`` at padded tokens."""
    squared = (2 * random(*tokens.mask.shape, device=device, seed=seed)).exp()
    return torch.where(tokens.mask, squared, pads)


def batch_of(tokens, samples=(0, 1, 2, 3), step=0):
    return Batch(step, tokens, samples=torch.tensor(samples))


def sampler_of(config, cls=Watched):
    sampler = cls(config)
    sampler.cache.known.add(LAYER)
    return sampler


def cached(sampler, device):
    tokens = right_padded(device)
    for step in range(3):
        sampler.cache.update(LAYER, batch_of(tokens), tokens, gradients(device, tokens, step))


def zero_entries(sampler, device):
    """Of some positions and samples the gradient was zero."""
    tokens = right_padded(device)
    squared = gradients(device, tokens)
    squared[:, ::2] = 0
    squared[1] = 0
    sampler.cache.update(LAYER, batch_of(tokens), tokens, squared)


def stale(sampler, device):
    """Learned of others, at another scale."""
    tokens = right_padded(device, (2, 8, 8, 1))
    squared = gradients(device, tokens, 5) * torch.logspace(-12, 12, SEQ, device=device)
    sampler.cache.update(LAYER, batch_of(tokens, (3, 2, 1, 0)), tokens, squared)


def resumed(sampler, device):
    other = sampler_of(sampler.config)
    cached(other, device)
    sampler.load_state_dict(other.state_dict(), device)


def empty(sampler, device):
    pass


#: How a cache comes about, and the samples of the batch that asks it.
STATES = {
    "empty": (empty, (0, 1, 2, 3)), "cached": (cached, (0, 1, 2, 3)), "half cached": (cached, (0, 1, 9, 10)),
    "never seen": (cached, (8, 9, 10, 11)), "zero entries": (zero_entries, (0, 1, 2, 3)),
    "stale": (stale, (0, 1, 2, 3)), "resumed": (resumed, (0, 1, 2, 3)),
}  # fmt: skip


@pytest.mark.parametrize(("state", "cache", "estimator"), pairwise(STATES, CACHES, ["wta", "crs"]))
def test_the_expected_weight_of_every_real_row_is_one(device, state, cache, estimator):
    config = CACHES[cache]
    sampler = sampler_of(WTACRS(**vars(config) | {"estimator": estimator}))
    fill, samples = STATES[state]
    fill(sampler, device)
    tokens = right_padded(device, (7, 8, 2, 4))
    x = random(BATCH, SEQ, IN, device=device, seed=3)
    draw = sampler.draw(LAYER, x, tokens, batch_of(tokens, samples))
    assert draw.index.shape == draw.scale.shape == (round(0.3 * tokens.real),)
    weights = expected_weights(estimator, sampler.p, sampler.k)
    real = tokens.mask.flatten().cpu()
    torch.testing.assert_close(weights[real], torch.ones_like(weights[real]), rtol=1e-5, atol=0)
    assert (weights[~real] > 0).all() if state == "empty" else not weights[~real].any()


def rows(device, dtype, mask):
    """Activations and output gradients with a few large rows; of pads the gradient is zero."""
    (h, of_h), (dz, of_dz) = (
        (random(BATCH, SEQ, width, device=device, seed=seed), random(BATCH, SEQ, 1, device=device, seed=seed + 1))
        for width, seed in ((IN, 1), (OUT, 3))
    )
    return (h * (1.5 * of_h).exp()).to(dtype), (dz * (1.5 * of_dz).exp() * mask[..., None]).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "estimator", "cache"),
    pairwise([torch.float32, torch.bfloat16, torch.float16], ["wta", "crs"], ["position", "sample_idx", "none"]),
)
def test_20_000_draws_of_a_stale_half_filled_cache_have_no_bias(device, dtype, estimator, cache):
    """Of what the op computes in backward (see test_wta_crs.py), all at once, from one stream of uniform numbers."""
    sampler, tokens = sampler_of(WTACRS(**vars(CACHES[cache]) | {"estimator": estimator})), right_padded(device)
    h, dz = rows(device, dtype, tokens.mask)
    squared = dz.float().square().sum(-1) * torch.linspace(0.1, 5, SEQ, device=device)  # stale
    sampler.cache.update(LAYER, batch_of(tokens, (0, 9, 2, 11)), tokens, squared)
    batch = batch_of(tokens)
    sampler.draw(LAYER, h, tokens, batch)
    index, scale = Sampler.choose(sampler, sampler.p.expand(20_000, -1), sampler.k, LAYER, batch)
    h, dz = h.flatten(0, 1), dz.flatten(0, 1)
    found = dz[index].mT @ (h[index] * scale[..., None]).to(dtype)
    assert standard_errors(found, dz.double().T @ h.double()) < 2


def test_what_a_backward_says_of_pads_which_are_drawn_unless_they_were_seen_without_a_gradient(device):
    """Nothing without a gradient (lora_B is zero at first) or without pads; one with a gradient is not forgotten."""
    padded, whole = right_padded(device), right_padded(device, (SEQ,) * BATCH)
    sampler, x = sampler_of(CACHES["position"]), random(BATCH, SEQ, IN, device=device)
    real = padded.mask.flatten().cpu()
    for tokens, scale, pads, expected in (
        (padded, 0.0, 0.0, UNSEEN), (whole, 1.0, 0.0, UNSEEN), (padded, 1.0, 0.0, ZERO), (padded, 1.0, 1e-20, NONZERO),
        (padded, 1.0, 0.0, NONZERO),
    ):  # fmt: skip
        sampler.cache.update(LAYER, batch_of(tokens), tokens, gradients(device, tokens, pads=pads) * scale)
        assert int(sampler.cache.layers[LAYER].pads) == expected
        sampler.draw(LAYER, x, padded, batch_of(padded))
        weights = expected_weights("wta", sampler.p, sampler.k)
        drawn = real.double() if expected == ZERO else torch.ones_like(weights)
        torch.testing.assert_close(weights, drawn, rtol=1e-5, atol=0)
    assert [(names, states.tolist()) for names, states in sampler.cache.pads()] == [([LAYER], [NONZERO])]


@pytest.mark.parametrize(("kind", "odd", "at"), pairwise(list(CACHES)[:2], [math.inf, math.nan], ["real", "pad"]))
def test_gradients_that_are_not_finite_teach_nothing(device, kind, odd, at):
    sampler = sampler_of(CACHES[kind])
    cached(sampler, device)
    before, tokens = sampler.state_dict(), right_padded(device)
    squared = gradients(device, tokens, 9)
    squared[(0, 0) if at == "real" else (2, 7)] = odd
    sampler.cache.update(LAYER, batch_of(tokens), tokens, squared)
    after = sampler.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("cache", CACHES)
def test_a_resumed_run_draws_the_same_bits_and_shares_nothing(device, cache):
    first, second = sampler_of(CACHES[cache]), sampler_of(CACHES[cache])
    cached(first, device)
    first.step = 5
    state = first.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    second.load_state_dict(state, device)
    tokens, x = right_padded(device), random(BATCH, SEQ, IN, device=device, seed=3)
    assert second.step == 5
    draws = [s.draw(LAYER, x, tokens, batch_of(tokens, (0, 1, 9, 10), s.step)) for s in (first, second)]
    assert torch.equal(draws[0].index, draws[1].index) and torch.equal(draws[0].scale, draws[1].scale)
    assert torch.equal(first.p, second.p)
    second.cache.update(LAYER, batch_of(tokens), tokens, gradients(device, tokens, 9) * 100)
    second.cache.learn()
    assert all(torch.equal(before[name], state[name]) for name in before)
    other = Watched(CACHES[cache])  # which has no such layer
    other.load_state_dict(state, device)
    assert not other.cache.layers


@pytest.mark.parametrize("end", ["first", "last"])
def test_the_profile_finds_a_hot_token_whatever_the_lengths(device, end):
    def hot(tokens):
        return tokens.mask & ((tokens.from_start if end == "first" else tokens.from_end) == 0)

    cache = NormCache("position", 0)
    for lengths in ((8, 5, 3, 6), (7, 2, 4, 8), (1, 6, 5, 3)):
        tokens = right_padded(device, lengths)
        cache.update(LAYER, batch_of(tokens), tokens, torch.where(hot(tokens), 100.0, 0.01) * tokens.mask)
    tokens = right_padded(device, (4, 7, 6, 2))
    predicted = cache.predict(LAYER, batch_of(tokens), tokens)
    cold = predicted[tokens.mask & ~hot(tokens)]
    assert predicted[hot(tokens)].min() > cold.max()
    assert predicted[hot(tokens)].min() > 2 * cold.mean()


def test_the_profile_is_a_running_mean(device):
    cache, tokens, found = NormCache("position", 0), right_padded(device, (SEQ,) * BATCH), []
    for seed in range(2):
        squared = gradients(device, tokens, seed)
        found.append((squared / squared.mean()).mean(0))
        cache.update(LAYER, batch_of(tokens), tokens, squared)
    torch.testing.assert_close(cache.layers[LAYER].start, torch.lerp(found[0], found[1], RATE))
    torch.testing.assert_close(cache.layers[LAYER].end, torch.lerp(found[0], found[1], RATE).flip(0))


def test_the_table_keeps_a_samples_norm_to_a_sixteenth_octave(device):
    cache, tokens = NormCache("sample_idx", 16), right_padded(device, (SEQ,) * BATCH)
    cache.known.add(LAYER)
    norms = torch.tensor([1e-2, 1.0, 30.0, 400.0], device=device)
    cache.update(LAYER, batch_of(tokens, (5, 0, 15, 7)), tokens, norms.square()[:, None].expand(-1, SEQ))
    predicted = cache.predict(LAYER, batch_of(tokens, (15, 7, 0, 5)), tokens)[:, 0]
    expected = norms[[2, 3, 1, 0]]
    ratio = (predicted / predicted[0]) / (expected / expected[0])
    assert (ratio.log2().abs() <= 2 / 16 + 1e-6).all()


@pytest.mark.parametrize("samples", [(0, 1), (0, 1, 2, 3, 4, 5, 6, 7)], ids=len)
def test_samples_that_are_not_the_rows_of_a_layer_are_left_aside(device, samples):
    # As in models for multiple choice, which lay the choices of a sample one under the other.
    sampler, tokens = sampler_of(CACHES["sample_idx"]), right_padded(device)
    cached(sampler, device)
    batch, before = batch_of(tokens, samples), sampler.state_dict()[f"{LAYER}/samples"]
    assert sampler.draw(LAYER, random(BATCH, SEQ, IN, device=device), tokens, batch) is not None
    sampler.cache.update(LAYER, batch, tokens, gradients(device, tokens))
    assert torch.equal(sampler.state_dict()[f"{LAYER}/samples"], before)


def test_a_sample_that_is_twice_in_a_batch_is_remembered_by_its_larger_norm(device):
    tables = []
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        sampler, tokens = sampler_of(CACHES["sample_idx"]), right_padded(device, (SEQ,) * BATCH)
        norms = torch.tensor([1.0, 4.0, 16.0, 2.0], device=device)[order]
        samples = tuple((5, 5, 1, 5)[i] for i in order)
        sampler.cache.update(LAYER, batch_of(tokens, samples), tokens, norms.square()[:, None].expand(-1, SEQ))
        tables.append(sampler.cache.layers[LAYER].samples)
    assert torch.equal(*tables)
    assert int(tables[0][1]) - int(tables[0][5]) == 8 * 2  # octaves


def test_tokens_are_where_a_layer_is():
    """As ``device_map`` places layers; the model's mask is on one device."""
    batch = Batch(0, Tokens(random(2, 8) > 0), other=Tokens(random(2, 6) > 0))
    for shape in ((2, 8, 4), (16, 4), (2, 6, 4)):
        here, there = torch.empty(shape), torch.empty(shape, device="meta")
        tokens = batch.tokens(there)
        assert tokens.mask.device == there.device and tokens.from_end.device == there.device
        assert tokens is batch.tokens(there) and tokens.real == batch.tokens(here).real
        assert batch.tokens(here) is (batch.other if shape[1] == 6 else batch.own)
    cache, tokens = NormCache("position", 0), batch.tokens(torch.empty(2, 8, 4, device="meta"))
    cache.update("layer", batch, tokens, torch.ones(2, 8, device="meta"))
    assert cache.predict("layer", batch, tokens).is_meta


def test_cross_attention_of_an_encoder_as_long_as_the_decoder_has_the_encoders_tokens():
    hidden = random(2, 8, 4)
    batch = Batch(0, Tokens(random(2, 8) > 0), other=Tokens(random(2, 8, seed=1) > 0))
    batch.other_storage = hidden.untyped_storage()._cdata
    assert batch.tokens(hidden) is batch.other and batch.tokens(random(2, 8, 4)) is batch.own


def test_a_batch_that_ends_keeps_the_masks_alone_of_what_is_not_known_outside():
    outside, inside = Batch(0, Tokens(random(2, 8) > 0)), Tokens(random(2, 6) > 0)
    for tokens in (outside.own, inside):
        assert tokens.from_end.shape == tokens.mask.shape
    Batch(0, outside.own, other=inside).forget(outside)
    assert "from_end" in vars(outside.own) and vars(inside).keys() == {"mask", "share"}


# Which samples a batch has: by their column of indices, or by what they contain.


def ids_of(lengths, left=False, width=20):
    rows = []
    for sample, length in enumerate(lengths):
        words = random(length, seed=sample).abs().mul(1000).long() + 5
        pads = torch.zeros(width - length, dtype=torch.long)
        rows.append(torch.cat([pads, words] if left else [words, pads]))
    ids = torch.stack(rows)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def test_a_samples_slot_is_that_of_its_content_whatever_the_padding():
    sampler, lengths = Sampler(WTACRS(cache="content", samples=2**40)), (20, 5, 17, 8)
    slots = sampler._samples(ids_of(lengths))
    assert slots.unique().numel() == len(lengths) and (slots >= 0).all()
    for width, left in ((20, True), (33, False), (64, True)):
        assert torch.equal(sampler._samples(ids_of(lengths, left, width)), slots), (width, left)
    swapped = ids_of(lengths)
    swapped["input_ids"][:, :2] = swapped["input_ids"][:, :2].flip(1)
    assert not (sampler._samples(swapped) == slots).any()


@pytest.mark.parametrize(("cache", "given", "message"), [
    ("content", torch.zeros(2, 3, 4), r"'content'\) expected input_ids .* got NoneType. Use cache='position'"),
    *(
        ("sample_idx", given, r"column 'sample_idx', a whole number a sample, got .*dataset.add_column")
        for given in (None, 3, torch.zeros(2, 2).long(), torch.zeros(2))
    ),
    ("sample_idx", torch.tensor([0, 16]), "numbers from 0 to 15, got 0 to 16. Set WTACRS"),
    ("sample_idx", torch.tensor([-1, 3]), "numbers from 0 to 15, got -1 to 3. Set WTACRS"),
])  # fmt: skip
def test_what_tells_no_samples_apart_is_refused(cache, given, message):
    with pytest.raises(ConfigError, match=message):
        Sampler(WTACRS(cache=cache, samples=16))._samples({"sample_idx": given, "inputs_embeds": given})
