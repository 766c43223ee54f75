"""Attacks by what a batch says of its sequences: positions that restart, and masks rewritten between steps."""

import pytest
import torch

from support.attacks import assert_alike
from support.helpers import live_bytes, random
from support.steps import patched, step
from support.zoo import Size, batch_for, build

SIZE = Size()


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


#: Each puts other numbers into a mask.
REWRITES = {
    "by NumPy": lambda mask, new: mask.numpy().__setitem__(slice(None), new.numpy()),
    "by data": lambda mask, new: mask.data.copy_(new),
    "in place": lambda mask, new: mask.copy_(new),
    "by another view": lambda mask, new: mask.view(torch.uint8).copy_(new.view(torch.uint8)),
    "never": lambda mask, new: None,
}


def trained(model, how, device):
    mask, found = causal(device), []
    for number in range(4):
        REWRITES[how](mask, narrow(causal(device), number))
        ids = batch_for(model, SIZE, seed=number)["input_ids"]
        found.append(step(model, {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}))
    return found


@pytest.mark.parametrize(
    ("family", "how"),
    [("llama", "by NumPy"), ("gpt2", "by data"), ("llama", "in place"), ("llama", "by another view")],
)
def test_a_mask_is_rewritten_between_steps(family, how, device):
    if how == "by NumPy" and device.type != "cpu":
        pytest.skip("NumPy sees the memory of the CPU only")

    def run(model):
        found, once = (trained(model, each, device) for each in (how, "never"))
        assert not any(torch.equal(a["loss"], b["loss"]) for a, b in zip(once, found, strict=True)), "no step shows it"
        return found

    assert_alike(lambda: build(family, SIZE).to(device), run)


@pytest.mark.parametrize(("how", "config"), [("in place", {}), ("by data", {"storage": "int8"})])
def test_a_mask_that_is_updated_leaves_nothing_behind(how, config, device):
    model = patched(build("llama", SIZE).to(device), config)
    mask, alive = causal(device), []
    ids = batch_for(model, SIZE)["input_ids"]
    for number in range(25):
        REWRITES[how](mask, narrow(causal(device), number))
        model(input_ids=ids, labels=ids, attention_mask=mask).loss.backward()
        model.zero_grad(set_to_none=True)
        if number % 8 == 0:
            alive.append(live_bytes())
    assert len(set(alive[1:])) == 1, alive
    left = random(4, 4, device=device)
    assert live_bytes() == alive[-1] + left.nbytes, "what a step leaves behind would not be seen"
