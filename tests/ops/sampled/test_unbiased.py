"""Sampled weight gradients have no bias: the mean error of many draws is what chance makes it, per op and dtype."""

import pytest
import torch
from torch import nn

from hf_memsave import WTACRS, MemSaveConfig, patch
from hf_memsave.ops.sampled.batch import Batch, Tokens
from hf_memsave.ops.sampled.sampler import Sampler
from hf_memsave.ops.sampled.wta_crs import LAYER
from support.draws import standard_errors
from support.helpers import random
from support.pairs import pairwise

BATCH, SEQ, IN, OUT = 4, 8, 6, 5
DRAWS = 20_000


def right_padded(device):
    return torch.arange(SEQ, device=device) < torch.tensor([8, 5, 3, 6], device=device)[:, None]


def rows(device, dtype=torch.float32):
    """Activations and output gradients with a few large rows; of pads the gradient is zero."""
    h = random(BATCH, SEQ, IN, device=device, seed=1) * (1.5 * random(BATCH, SEQ, 1, device=device, seed=2)).exp()
    dz = random(BATCH, SEQ, OUT, device=device, seed=3) * (1.5 * random(BATCH, SEQ, 1, device=device, seed=4)).exp()
    return h.to(dtype), (dz * right_padded(device)[..., None]).to(dtype)


def linear():
    return nn.Sequential(nn.Linear(IN, OUT))


def sampled(kind, device, dtype, **options):
    """A model of one sampled layer, the layer, and the layer's weight."""
    torch.manual_seed(0)
    model = kind().to(device, dtype).train()
    patch(model, MemSaveConfig(linear=WTACRS(minimum=1, targets=("0",), **options)))
    (layer,) = (m for m in model.modules() if LAYER in m.__dict__ and m.weight.requires_grad)
    return model, layer


def backward(model, layer, h, dz):
    model.zero_grad()
    model(h).backward(dz)
    return layer.weight.grad.clone()


# 20,000 times at once: the sampler's own draws and the op's own arithmetic, over a batch of draws.


def gradients(index, scale, h, dz):
    """What the op computes in backward, of each draw ``[draws, k]``."""
    h, dz = h.flatten(0, 1), dz.flatten(0, 1)
    drawn = (h[index] * scale[..., None]).to(h.dtype)
    return dz[index].mT @ drawn


def draws(sampler, h, mask, samples=None):
    """20,000 draws from what the sampler makes of this batch now, from one stream of uniform numbers."""
    taken = {}
    choose = sampler.choose
    sampler.choose = lambda p, k, layer, batch, *_: taken.update(p=p, k=k) or choose(p, k, layer, batch)
    batch = Batch(0, Tokens(mask), samples=samples)
    sampler.draw("layer", h, batch.own, batch)
    return choose(taken["p"].expand(DRAWS, -1), taken["k"], "layer", batch)


def cached(config, device, dtype):
    """A sampler that has learned of every other sample."""
    sampler, mask = Sampler(config), right_padded(device)
    sampler.cache.known.add("layer")
    _, dz = rows(device, dtype)
    squared = dz.float().square().sum(-1) * torch.linspace(0.1, 5, SEQ, device=device)  # stale
    sampler.cache.update("layer", Batch(0, samples=torch.tensor([0, 9, 2, 11])), Tokens(mask), squared)
    return sampler


@pytest.mark.parametrize(
    ("dtype", "estimator", "cache"),
    pairwise([torch.float32, torch.bfloat16, torch.float16], ["wta", "crs"], ["position", "sample_idx", None]),
)
def test_20_000_draws_of_a_stale_half_filled_cache_have_no_bias(device, dtype, estimator, cache):
    samples = 16 if cache == "sample_idx" else None
    sampler = cached(WTACRS(minimum=1, estimator=estimator, cache=cache, samples=samples), device, dtype)
    h, dz = rows(device, dtype)
    draw = draws(sampler, h, right_padded(device), torch.arange(BATCH))
    truth = dz.double().flatten(0, 1).T @ h.double().flatten(0, 1)
    assert standard_errors(gradients(*draw, h, dz), truth) < 2


def test_a_batch_of_draws_is_what_the_op_computes(device):
    model, layer = sampled(linear, device, torch.float32, cache=None)
    h, dz = rows(device)
    sampler = layer.__dict__[LAYER].sampler
    sampler.step = 0
    found = backward(model, layer, h, dz)
    ones = Tokens(torch.ones(BATCH, SEQ, dtype=torch.bool, device=device))  # a Sequential knows no mask
    index, scale = sampler.draw(layer.__dict__[LAYER].name, h, ones, Batch(0))
    torch.testing.assert_close(found, gradients(index, scale, h, dz))
