"""Backward of several gradients at once, under vmap: per-sample gradients, Jacobians, influence functions."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_memsave import MemSaveConfig, measure_kept, patch
from support.families import Size, batch_for, build
from support.helpers import assert_same_bits, random

SIZE = Size(hidden=64, heads=2, layers=2, batch=4, seq=32)


def losses(model, batch):
    torch.manual_seed(1)
    logits = model(**batch).logits
    logits = logits if logits.dim() == 2 else logits[:, 0]
    return F.cross_entropy(logits, torch.zeros(SIZE.batch, dtype=torch.long), reduction="none")


@pytest.mark.parametrize("config", [MemSaveConfig(), MemSaveConfig(dropout="mask")], ids=["seed", "mask"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_batched_gradients_of_a_model_with_dropout_are_stocks(family, config):
    found = []
    for is_patched in (False, True):
        model = build(family, SIZE)
        batch = {n: x for n, x in batch_for(model, SIZE).items() if n != "labels"}
        if is_patched:
            patch(model, config)
        parameters = [p for p in model.parameters() if p.dim() > 1]
        state = torch.get_rng_state()
        found.append(
            torch.autograd.grad(
                losses(model, batch), parameters, torch.eye(SIZE.batch), is_grads_batched=True, allow_unused=True
            )
        )
        torch.set_rng_state(state)
    for mine, theirs in zip(*found, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("randomness", ["same", "different", "error"])
def test_under_vmap_of_any_randomness(randomness):
    found = []
    for is_patched in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Tanh(), nn.Linear(64, 4))
        if is_patched:
            patch(model)
        torch.manual_seed(1)
        y = model(random(50, 8)).sum(0)
        weight = model[0].weight
        rows = torch.func.vmap(lambda dy, y=y, w=weight: torch.autograd.grad(y, w, dy, retain_graph=True)[0],
                               randomness=randomness)(torch.eye(4))  # fmt: skip
        found.append(rows)
    assert_same_bits(*found)


def test_a_tensor_of_a_transform_that_somebody_holds_does_not_stop_the_meter():
    held = []
    torch.func.vmap(lambda x: held.append(x) or x * 2)(torch.ones(3, 4))
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    assert measure_kept(model, random(2, 8)).total > 0
    assert held
