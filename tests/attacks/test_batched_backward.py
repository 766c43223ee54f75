"""Backward of several gradients at once, under vmap: per-sample gradients, Jacobians, influence functions."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_memsave import measure_kept, patch
from support.helpers import random
from support.zoo import Size, batch_for, build

SIZE = Size(hidden=64, heads=2, layers=2, batch=4, seq=32)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_batched_gradients_of_a_model_with_dropout_are_stocks(family):
    found = []
    for config in (None, True, {"dropout": "mask"}):
        model = build(family, SIZE)
        batch = {n: x for n, x in batch_for(model, SIZE).items() if n != "labels"}
        if config is not None:
            patch(model, config)
        parameters = [p for p in model.parameters() if p.dim() > 1]
        torch.manual_seed(1)
        logits = model(**batch).logits
        logits = logits if logits.dim() == 2 else logits[:, 0]
        losses = F.cross_entropy(logits, torch.zeros(SIZE.batch, dtype=torch.long), reduction="none")
        options = dict(is_grads_batched=True, allow_unused=True)
        found.append(torch.autograd.grad(losses, parameters, torch.eye(SIZE.batch), **options))
    for stock, *ours in zip(*found, strict=True):
        for mine in ours:
            assert (mine is None) == (stock is None)
            if mine is not None:
                torch.testing.assert_close(mine, stock, rtol=1e-5, atol=1e-7)


def test_a_tensor_of_a_transform_that_is_held_does_not_stop_the_meter():
    held = []
    torch.func.vmap(lambda x: held.append(x) or x * 2)(torch.ones(3, 4))
    assert measure_kept(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), random(2, 8)).total > 0
    assert held
