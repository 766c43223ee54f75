"""The promise of the default: same loss, gradients and trained parameters, to the bit, dropout included."""

import copy
import os

import pytest
import torch
from transformers import AlbertConfig, AlbertForSequenceClassification

from hf_memsave import MemSaveConfig, patch
from hf_memsave.tape.content import Content
from support.families import FAMILIES, MORE, QUOTED, VOCAB, Size, batch_for, build
from support.helpers import assert_same_bits, halved, only_on_cpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE = Size(hidden=64, heads=4, batch=2, seq=32)
MODES = {"fp32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.float32}
STEPS = 20


@pytest.fixture(autouse=True)
def claimed():
    only_on_cpu(DEVICE)


@pytest.fixture
def all_threads():
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)


def train(model, mode, padded):
    """Losses, the first step's gradients, and the parameters after all steps."""
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses, first = [], {}
    for step in range(STEPS):
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=mode == "autocast"):
            loss = model(**batch_for(model, SIZE, padded, seed=step)).loss
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first, dict(model.named_parameters())


def assert_same_training(model, config, mode, padded):
    ours = copy.deepcopy(model.to(DEVICE))
    patch(ours, config)
    stock_losses, stock_grads, stock_parameters = train(model, mode, padded)
    losses, grads, parameters = train(ours, mode, padded)
    assert losses == stock_losses
    assert len(set(losses)) > STEPS // 4  # the run did move
    assert grads.keys() == stock_grads.keys()
    assert [n for n in grads if not torch.equal(grads[n], stock_grads[n])] == []
    assert [n for n in parameters if not torch.equal(parameters[n], stock_parameters[n])] == []


@pytest.mark.long
@pytest.mark.parametrize(("family", "mode", "padded"), halved(FAMILIES, MODES, [False, True]))
def test_training_equals_stock_bit_for_bit(family, mode, padded):
    assert_same_training(build(family, SIZE, MODES[mode]), MemSaveConfig(), mode, padded)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", MORE)
def test_training_of_more_families_equals_stock_bit_for_bit(family, mode):
    assert_same_training(build(family, SIZE, MODES[mode]), MemSaveConfig(), mode, padded=True)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_gradients_equal_stock_at_full_size_on_all_threads(family, all_threads):
    stock = build(family, QUOTED).to(DEVICE)
    ours = copy.deepcopy(stock)
    patch(ours)
    for model in (stock, ours):
        torch.manual_seed(3)
        model(**batch_for(model, QUOTED, padded=True)).loss.backward()
    for (name, expected), got in zip(stock.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(got.grad, expected.grad), name


@pytest.mark.parametrize("family", ["bert", "t5-gated-encoder"])
def test_training_with_masks_equals_stock_bit_for_bit(family):
    assert_same_training(build(family, SIZE), MemSaveConfig(dropout="mask"), "fp32", padded=False)


def test_a_trained_position_bias_and_attention_dropout_change_nothing():
    model = build("t5-encoder", SIZE)
    for module in model.modules():
        if type(module).__name__ == "T5Attention":
            module.dropout = 0.1
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    assert_same_training(model, MemSaveConfig(), "fp32", padded=True)


def test_frozen_parameters_change_nothing():
    model = build("llama", SIZE)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "v_proj" in name)
    assert_same_training(model, MemSaveConfig(), "fp32", padded=False)


def test_a_wrong_recomputation_would_be_seen(monkeypatch):
    right = Content._run

    def wrong(node):
        out = right(node)
        return out * 1.0001 if out.is_floating_point() else out

    monkeypatch.setattr(Content, "_run", wrong)
    with pytest.raises(AssertionError):
        assert_same_training(build("llama", SIZE), MemSaveConfig(), "fp32", padded=False)


def test_blocks_that_share_their_weights_equal_stock_under_autocast():
    # Autocast's cache lasts for the whole forward, whatever of it the tape gives back in between.
    torch.manual_seed(0)
    options = dict(embedding_size=32, hidden_size=64, num_attention_heads=4, intermediate_size=128, vocab_size=VOCAB)
    model = AlbertForSequenceClassification(AlbertConfig(**options, num_hidden_layers=4)).train()
    assert_same_training(model, MemSaveConfig(), "autocast", padded=True)


def test_a_linear_called_twice_under_autocast_is_as_in_stock():
    # Autocast casts its weight once, and adds the two weight gradients in bf16; in two submodules of a model too.
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = torch.nn.LayerNorm(64), torch.nn.Linear(64, 64)

        def forward(self, x):
            return self.linear(torch.nn.functional.gelu(self.linear(self.norm(x)))).float().pow(2).mean()

    stock, x = Twice().to(DEVICE), torch.randn(512, 64, device=DEVICE)
    ours = copy.deepcopy(stock)
    patch(ours)
    for model in (stock, ours):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = model(x)
        loss.backward()
    for (name, expected), got in zip(stock.named_parameters(), ours.parameters(), strict=True):
        assert_same_bits(got.grad, expected.grad, name)
