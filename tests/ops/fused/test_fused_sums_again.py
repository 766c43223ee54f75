"""The sum before a fused norm, made again from the sum before the last one: when, to which bits, and when it is not."""

import copy

import pytest
import torch
from torch import nn
from transformers import BertConfig, ElectraConfig, ElectraModel
from transformers.models.bert.modeling_bert import BertOutput, BertSelfOutput

from hf_memsave import MemSaveConfig, measure_kept, patch
from hf_memsave.measure.fake_device import fake_device, to_fake
from hf_memsave.ops.fused import dropout_norm
from support.helpers import assert_same_bits, random
from support.kernels import interpreted, rounding  # noqa: F401

WIDTH = 16


class Sublayers(nn.Module):
    """Two as in a layer of BERT, the second one's residual being the first one's output; between them ``between``."""

    def __init__(self, p, between):
        super().__init__()
        config = BertConfig(hidden_size=WIDTH, intermediate_size=WIDTH, hidden_dropout_prob=p)
        self.first, self.up, self.second = BertSelfOutput(config), nn.Linear(WIDTH, WIDTH), BertOutput(config)
        self.between = between

    def forward(self, x):
        y = self.first(x.tanh(), x)
        given = self.between(self, y)
        return self.second(self.up(y).tanh(), y if given is None else given)


def made(device, p=0.2, between=lambda module, y: None):
    torch.manual_seed(0)
    model = Sublayers(p, between).to(device)
    for norm in (model.first.LayerNorm, model.second.LayerNorm):
        nn.init.uniform_(norm.weight, 0.5, 2.0)
        nn.init.normal_(norm.bias)
    return model


def gradients(model, device, dtype=torch.bfloat16):
    """Under autocast: a sum in fp32 is made again from a product in 16 bits."""
    torch.manual_seed(1)
    x = random(3, 8, WIDTH, device=device).requires_grad_()
    with torch.autocast(x.device.type, dtype):
        y = model(x * 1.5)
    return [y.detach(), *torch.autograd.grad(y.float().cos().sum(), [x, *model.parameters()])]


def patched(model):
    ours = copy.deepcopy(model)
    patch(ours, MemSaveConfig(backend="triton"))
    return ours


@pytest.fixture
def summed(monkeypatch):
    """Whether a norm was given, at each sum that was made again."""
    package, found = dropout_norm.kernels(), []
    stock = package.dropout_sum

    def dropout_sum(x, residual, p, seed, norm=None):
        found.append(norm is not None)
        return stock(x, residual, p, seed, norm)

    monkeypatch.setattr(package, "dropout_sum", dropout_sum)
    return found


def without(monkeypatch, model, device, dtype):
    """The gradients where every residual is made again by itself."""
    with monkeypatch.context() as context:
        context.setattr(dropout_norm, "_before", lambda tape, y, dtype: None)
        ours = patched(model)
        return [gradients(ours, device, dtype) for _ in range(3)][-1]


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_it_has_the_bits_of_the_sum_that_was(device, p, dtype, summed, monkeypatch):
    model = made(device, p)
    ours = patched(model)
    for _ in range(3):
        summed.clear()
        got = gradients(ours, device, dtype)
        assert True in summed
    for mine, theirs in zip(got, without(monkeypatch, model, device, dtype), strict=True):
        assert_same_bits(mine, theirs)


def write(module, y):
    y.mul_(2)


def write_unseen(module, y):
    y.data.mul_(2)


def another(module, y):
    return y * 2


def a_view(module, y):
    return y.flip(0)


def transposed(module, y):
    return y.reshape(-1, WIDTH)[:16].t().reshape(1, 16, WIDTH).expand(3, 16, WIDTH)[:, :8]


@interpreted
@pytest.mark.parametrize("between", [write, write_unseen, another, a_view, transposed])
def test_a_residual_that_is_not_the_last_norms_output_is_added_itself(device, between, monkeypatch, summed):
    model = made(device, 0.0, between)
    ours = patched(model)
    for _ in range(3):
        for mine, theirs in zip(gradients(ours, device), gradients(model, device), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.02 * float(theirs.abs().amax()))
    assert True not in summed


@interpreted
def test_it_keeps_no_more(device, monkeypatch):
    model = made(device)

    def kept():
        ours = patched(model)
        for _ in range(3):
            gradients(ours, device)
        x = random(3, 8, WIDTH, device=device).requires_grad_()

        def forward(x):
            with torch.autocast(x.device.type, torch.bfloat16):
                return ours(x * 1.5).sum()

        return measure_kept(ours, {"x": x}, forward).total

    now = kept()
    monkeypatch.setattr(dropout_norm, "_before", lambda tape, y, dtype: None)
    assert now <= kept()


def test_a_first_residual_in_16_bits_is_added_itself():
    """As Electra-small's, whose embeddings go through a linear: its sum is in 16 bits, and the norm's output is not."""
    config = ElectraConfig(
        embedding_size=8, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        vocab_size=16, max_position_embeddings=16,
    )  # fmt: skip
    with torch.device("meta"):
        model = ElectraModel(config).train()
    with fake_device() as device:
        to_fake(model, device)
        patch(model, MemSaveConfig(backend="triton"))
        ids = torch.zeros(2, 8, dtype=torch.long, device=device)
        for _ in range(3):
            with torch.autocast(device.type, torch.bfloat16):
                y = model(input_ids=ids).last_hidden_state
            y.float().sum().backward()
    assert all(p.grad is not None for p in model.encoder.parameters())
