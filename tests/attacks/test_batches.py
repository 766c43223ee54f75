"""Attacks by a caller who fills the tensors of a batch again, before backward has run."""

import copy

import pytest
import torch

from hf_memsave import patch
from support.families import build
from support.modes import SMALL
from support.steps import assert_same, gradients


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("family", "name"), [("llama", "attention_mask"), ("t5-decoder", "attention_mask"), ("llama", "labels")]
)
def test_one_tensor_is_filled_for_every_forward_of_a_backward(family, name, attention, device):
    stock = build(family, SMALL).to(device)
    stock.set_attn_implementation(attention)
    ours = copy.deepcopy(stock)
    patch(ours)
    ids = torch.randint(5, 20, (2, SMALL.seq), device=device)
    results = []
    for model in (stock, ours):
        batch = {"attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        losses = []
        for number in range(3):
            torch.manual_seed(number)
            batch[name][:, :number] = 0
            batch[name][:, number:] = 1
            losses.append(model(input_ids=ids.clone(), **batch).loss)
        sum(losses).backward()
        results.append({"loss": sum(losses).detach(), **gradients(model)})
    assert_same(*results)
