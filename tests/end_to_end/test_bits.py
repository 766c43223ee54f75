"""The promise of the default: same loss, gradients and trained parameters, to the bit; less kept, and nothing left."""

import copy
import os

import pytest
import torch
from torch import nn
from transformers import AlbertConfig, AlbertForSequenceClassification

from hf_memsave import MemSaveConfig, measure_kept, patch
from hf_memsave.tape.content import Content
from support.families import FAMILIES, MODES, MORE, QUOTED, VOCAB, ZOO, Size, batch_for, build, step_in
from support.helpers import assert_same_bits, halved, nodes, only_on_cpu
from support.steps import assert_same

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE = Size(hidden=64, heads=4, batch=2, seq=32)
STEPS = 20

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def claimed():
    only_on_cpu(DEVICE)


@pytest.fixture
def all_threads():
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)


def train(model, mode, padded, steps):
    """Losses, the first step's gradients, and the parameters after all steps."""
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses, first = [], {}
    for step in range(steps):
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=mode == "autocast"):
            loss = model(**batch_for(model, SIZE, padded, seed=step)).loss
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first, dict(model.named_parameters())


def assert_same_training(model, mode="fp32", padded=False, steps=STEPS, **fields):
    ours = copy.deepcopy(model.to(DEVICE))
    patch(ours, MemSaveConfig(**fields))
    stock_losses, stock_grads, stock_parameters = train(model, mode, padded, steps)
    losses, grads, parameters = train(ours, mode, padded, steps)
    assert losses == stock_losses
    assert len(set(losses)) > steps // 4  # the run did move
    assert grads.keys() == stock_grads.keys()
    assert [n for n in grads if not torch.equal(grads[n], stock_grads[n])] == []
    assert [n for n in parameters if not torch.equal(parameters[n], stock_parameters[n])] == []
    assert not nodes(), "what the tape made outlives the last step"
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=mode == "autocast"):
        kept, of_stock = (measure_kept(each, batch_for(model, SIZE, padded)).total for each in (ours, model))
    assert kept < of_stock


@pytest.mark.long
@pytest.mark.parametrize(("family", "mode", "padded"), halved(FAMILIES, MODES, [False, True]))
def test_training_equals_stock_bit_for_bit(family, mode, padded):
    assert_same_training(build(family, SIZE, MODES[mode]), mode, padded)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", MORE + ZOO)
def test_training_of_more_families_equals_stock_bit_for_bit(family, mode):
    if family in ZOO:
        only_on_cpu(DEVICE, "what was tried")
    assert_same_training(build(family, SIZE, MODES[mode]), mode, padded=True, steps=4)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_gradients_equal_stock_at_full_size_on_all_threads(family, all_threads):
    stock = build(family, QUOTED).to(DEVICE)
    ours = copy.deepcopy(stock)
    patch(ours)
    batch = batch_for(stock, QUOTED, padded=True)
    assert_same(step_in("fp32", ours, batch), step_in("fp32", stock, batch))


@pytest.mark.parametrize("family", ["bert", "t5-gated-encoder"])
def test_training_with_masks_equals_stock_bit_for_bit(family):
    assert_same_training(build(family, SIZE), dropout="mask")


def test_a_trained_position_bias_and_attention_dropout_change_nothing():
    model = build("t5-encoder", SIZE)
    for module in model.modules():
        if type(module).__name__ == "T5Attention":
            module.dropout = 0.1
    model.requires_grad_(True)
    assert_same_training(model, padded=True)


def test_frozen_parameters_change_nothing():
    model = build("llama", SIZE)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "v_proj" in name)
    assert_same_training(model)


def test_a_wrong_recomputation_would_be_seen(monkeypatch):
    right = Content._run

    def wrong(node):
        out = right(node)
        return out * 1.0001 if out.is_floating_point() else out

    monkeypatch.setattr(Content, "_run", wrong)
    with pytest.raises(AssertionError):
        assert_same_training(build("llama", SIZE), steps=4)


def test_blocks_that_share_their_weights_equal_stock_under_autocast():
    # Autocast's cache lasts for the whole forward, whatever of it the tape gives back in between.
    torch.manual_seed(0)
    options = dict(embedding_size=32, hidden_size=64, num_attention_heads=4, intermediate_size=128, vocab_size=VOCAB)
    model = AlbertForSequenceClassification(AlbertConfig(**options, num_hidden_layers=4)).train()
    assert_same_training(model, "autocast", padded=True)


def test_a_linear_called_twice_under_autocast_is_as_in_stock():
    # Autocast casts its weight once, and adds the two weight gradients in bf16; in two submodules of a model too.
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)

        def forward(self, x):
            return self.linear(nn.functional.gelu(self.linear(self.norm(x)))).float().pow(2).mean()

    stock, x = Twice().to(DEVICE), torch.randn(512, 64, device=DEVICE)
    ours = copy.deepcopy(stock)
    patch(ours)
    for model in (stock, ours):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = model(x)
        loss.backward()
    for (name, expected), got in zip(stock.named_parameters(), ours.parameters(), strict=True):
        assert_same_bits(got.grad, expected.grad, name)


# Batches of 3 x 29 tokens, models of width 24: no tensor is a whole number of a code's blocks.

ODD = Size(hidden=24, heads=3, layers=2, batch=3, seq=29)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5-decoder"])
def test_odd_sizes_have_stocks_bits(family, dtype):
    model = build(family, ODD, MODES[dtype]).to(DEVICE)
    batch = batch_for(model, ODD)
    stock = step_in(dtype, model, batch)
    for fields in ({}, {"dropout": "mask"}, {"checkpoint": "block"}, {"offload": True}):
        patch(model, MemSaveConfig(**fields), replace=True)
        for _ in range(3):
            assert_same(step_in(dtype, model, batch), stock)
