"""Modules of one's own: same bits, fewer bytes. (Models of Transformers are in end_to_end/test_bits.py.)"""

import copy

import pytest
import torch
from torch import nn
from transformers import BertModel
from transformers.utils import ModelOutput

from hf_memsave import measure_kept, patch
from support.helpers import only_on_cpu
from support.steps import assert_same, patched_classes, patched_copy, step, with_uneven_vectors
from support.zoo import batch_for, build


@pytest.mark.parametrize("kind", ["gemma", "olmo2"])
def test_a_norm_whose_arithmetic_is_not_known_is_never_approximated(kind, device):
    """Gemma's multiplies with one plus the weight, OLMo2's rounds after multiplying."""
    only_on_cpu(device)
    stock = with_uneven_vectors(build(kind))
    ours = copy.deepcopy(stock)
    report = patch(ours, {"norm": "output"})
    assert {site.op for site in report.sites} == {"model", "block"}
    batch = batch_for(stock)
    assert_same(step(ours, batch), step(stock, batch))


class InPlace(nn.Module):
    """Writes to what came before, or would be kept."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.SiLU(inplace=True), nn.Dropout(0.1, inplace=True))

    def forward(self, x):
        y = self.layers(x)
        return (x + y).add_(1).mul_(y)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8))
            for _ in range(3)
        )

    def forward(self, x):
        for block in self.inner:
            x = x + block(x)
        return x


class Loss(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), inner

    def forward(self, x):
        return ModelOutput(loss=self.inner(self.norm(x)).square().mean())


class Wrapper(nn.Module):
    """BERT and a head."""

    def __init__(self):
        super().__init__()
        self.encoder = BertModel(build("bert").config, add_pooling_layer=False)
        self.head = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 2))

    def forward(self, **inputs):
        return ModelOutput(loss=self.head(self.encoder(**inputs).last_hidden_state).square().mean())


#: Class -> the most that it keeps of what stock keeps.
OWN = {InPlace: 0.69, Mixer: 0.375, Wrapper: 0.62}


def own(cls, device):
    torch.manual_seed(0)
    if cls is Wrapper:
        ids = torch.randint(5, 512, (2, 16), device=device)
        return Wrapper().to(device).train(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return Loss(cls()).to(device).train(), {"x": torch.randn(64, 64, 8, device=device)}


@pytest.mark.parametrize("cls", OWN)
def test_a_module_of_ones_own_trains_with_the_same_bits_and_keeps_less(cls, device):
    only_on_cpu(device)
    stock, batch = own(cls, device)
    ours = patched_copy(stock)
    assert_same(step(ours, batch), step(stock, batch))
    assert measure_kept(ours, batch).total <= OWN[cls] * measure_kept(stock, batch).total


def test_what_lays_a_tape_in_a_wrapper(device):
    model, batch = own(Mixer, device)
    parallel = nn.DataParallel(model)  # one of torch
    stock = measure_kept(parallel, batch).total
    assert [(site.op, site.name) for site in patch(parallel).patched] == [("model", "module")]
    assert measure_kept(parallel, batch).total < OWN[Mixer] * stock
    model, batch = own(Wrapper, device)
    assert [(site.op, site.name) for site in patch(model).patched] == [
        ("model", ""), ("block", "encoder.encoder.layer.0"), ("block", "encoder.encoder.layer.1"),
    ]  # fmt: skip
    assert set(patched_classes(model)) == {"", "encoder.encoder.layer.0", "encoder.encoder.layer.1"}

    kept = measure_kept(model, batch).by_module
    # The norm's input, mean and 1/std; GELU's input; the mask's bits; and what the loss takes in.
    assert {name for name in kept if name.startswith("head.")} == {"head.0", "head.1", "head.3", "head.4"}
    assert kept["head.3"] == 2 * 16 * 128 // 8
