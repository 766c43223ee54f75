"""Attacks by what a batch says of its sequences: positions that restart, and masks rewritten between steps."""

import gc

import pytest
import torch

from hf_memsave import patch
from hf_memsave.count.kept import live_tensors, storages
from support.attacks import assert_alike
from support.helpers import random
from support.steps import step
from support.zoo import Size, batch_for, build

SIZE = Size(hidden=32, heads=4, layers=2, batch=2, seq=16)


def packed(model):
    """Two sequences a row, of 6 and 10 tokens, told apart by their positions alone."""
    positions = torch.cat([torch.arange(6), torch.arange(10)]).expand(SIZE.batch, -1).contiguous()
    ids = batch_for(model, SIZE)["input_ids"]
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions.to(ids.device)}


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("phi3", "eager"), ("gpt2", "sdpa")])
def test_positions_restart(family, attention, device):
    def make():
        model = build(family, SIZE).to(device)
        model.set_attn_implementation(attention)
        return model

    assert_alike(make, lambda model: step(model, packed(model)))
    assert_alike(make, lambda model: step(model, packed(model))["loss"], "tempo")
    with_cache, without = (step(make(), packed(make()), **options)["loss"] for options in ({}, {"use_cache": False}))
    assert not torch.equal(with_cache, without), "that a cache is refused, as patching does, would not be seen"


# A boolean mask of four dimensions, which SDPA makes a float one of


def causal(device):
    return torch.ones(SIZE.seq, SIZE.seq, dtype=torch.bool, device=device).tril().repeat(SIZE.batch, 1, 1, 1)


def narrow(mask, number):
    """Another window at each step."""
    return mask & torch.ones_like(mask).triu(-1 - number % 5)


def by_numpy(mask, number):
    mask.numpy()[:] = narrow(causal("cpu"), number).numpy()


def by_data(mask, number):
    mask.data.copy_(narrow(causal(mask.device), number))


def in_place(mask, number):
    mask.copy_(narrow(causal(mask.device), number))


def by_another_view(mask, number):
    mask.view(torch.uint8).copy_(narrow(causal(mask.device), number).view(torch.uint8))


def trained(model, rewrite, device):
    mask, found = causal(device), []
    for number in range(4):
        rewrite(mask, number)
        ids = batch_for(model, SIZE, seed=number)["input_ids"]
        found.append(step(model, {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}))
    return found


@pytest.mark.parametrize(
    ("family", "rewrite"), [("llama", by_numpy), ("gpt2", by_data), ("llama", in_place), ("llama", by_another_view)]
)
def test_a_mask_is_rewritten_between_steps(family, rewrite, device):
    if rewrite is by_numpy and device.type != "cpu":
        pytest.skip("NumPy sees the memory of the CPU only")

    def run(model):
        found, once = (trained(model, by, device) for by in (rewrite, lambda mask, number: None))
        assert not any(torch.equal(a["loss"], b["loss"]) for a, b in zip(once, found, strict=True)), "no step shows it"
        return found

    assert_alike(lambda: build(family, SIZE).to(device), run)


def live_bytes():
    gc.collect()
    return sum({s._cdata: s.nbytes() for s in storages(live_tensors())}.values())


@pytest.mark.parametrize(("rewrite", "config"), [(in_place, {}), (by_data, {"storage": "int8"})], ids=["", "int8"])
def test_a_mask_that_is_updated_leaves_nothing_behind(rewrite, config, device):
    model = build("llama", SIZE).to(device)
    patch(model, config)
    mask, alive = causal(device), []
    ids = batch_for(model, SIZE)["input_ids"]
    for number in range(25):
        rewrite(mask, number)
        model(input_ids=ids, labels=ids, attention_mask=mask).loss.backward()
        model.zero_grad(set_to_none=True)
        if number % 8 == 0:
            alive.append(live_bytes())
    assert len(set(alive[1:])) == 1, alive
    left = random(4, 4, device=device)
    assert live_bytes() == alive[-1] + left.nbytes, "what a step leaves behind would not be seen"
