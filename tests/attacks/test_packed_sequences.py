"""Attacks by what a batch says of its sequences: positions that restart, and masks rewritten between steps."""

import gc

import pytest
import torch

from hf_memsave import MemSaveConfig, patch
from hf_memsave.tape.meter import live_tensors, storages
from support.attacks import assert_alike
from support.families import Size, batch_for, build
from support.helpers import random
from support.steps import step

SIZE = Size(hidden=32, heads=4, layers=2, batch=2, seq=16)
PACKED = ("llama", "mistral", "phi3", "qwen2", "gpt2")


def packed(model):
    """Two sequences a row, of 6 and 10 tokens, told apart by their positions alone."""
    positions = torch.cat([torch.arange(6), torch.arange(10)]).expand(SIZE.batch, -1).contiguous()
    ids = batch_for(model, SIZE)["input_ids"]
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions.to(ids.device)}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", PACKED)
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


REWRITES = (by_numpy, by_data, in_place, by_another_view)


def trained(model, rewrite, device):
    mask, found = causal(device), []
    for number in range(4):
        rewrite(mask, number)
        ids = batch_for(model, SIZE, seed=number)["input_ids"]
        found.append(step(model, {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}))
    return found


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda rewrite: rewrite.__name__)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
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


@pytest.mark.parametrize("config", [MemSaveConfig(), MemSaveConfig(storage="int8")], ids=["exact", "int8"])
@pytest.mark.parametrize("rewrite", [in_place, by_data], ids=lambda rewrite: rewrite.__name__)
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


def test_what_each_step_leaves_behind_would_be_seen(device):
    left = [random(4, 4, device=device)]
    before = live_bytes()
    left.append(random(4, 4, device=device))
    assert live_bytes() == before + left[0].nbytes
