"""Layers to patch by themselves, and a stock model around each."""

import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import BertConfig, LlamaConfig
from transformers.activations import NewGELUActivation, QuickGELUActivation
from transformers.models.bert.modeling_bert import BertLayer, BertSelfAttention
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hf_memsave import patch
from support.helpers import random

N, ROWS, WIDTH = 256 * 32, 256, 32
FLAT, IMAGE = (4, 64, WIDTH), (2, 16, 16, 16)  # N numbers each
EAGER = dict(attn_implementation="eager", hidden_size=WIDTH, num_attention_heads=4, attention_probs_dropout_prob=0.1)


class Layer(NamedTuple):
    """How to make a layer, what to patch it with, the bytes that frees, and the largest relative gradient error."""

    make: Any
    config: Any = True
    freed: int | None = None  # None: some
    error: float = 0.0
    shape: tuple[int, ...] = FLAT


def frozen(make):
    return lambda: make().requires_grad_(False)


def in_eval(make):
    return lambda: make().requires_grad_(False).eval()


LAYERS = {
    # Spared only where the tape also sees the layer after it, which stands outside.
    "gelu": Layer(nn.GELU, freed=0),
    "layer norm": Layer(lambda: nn.LayerNorm(WIDTH), freed=0),
    "layer norm from its output": Layer(lambda: nn.LayerNorm(WIDTH), "tempo", freed=0),
    "group norm": Layer(lambda: nn.GroupNorm(2, 16), freed=0, shape=IMAGE),
    "batch norm": Layer(lambda: nn.BatchNorm2d(16), freed=0, shape=IMAGE),
    "relu": Layer(nn.ReLU, freed=-N // 8),
    "relu in place": Layer(partial(nn.ReLU, inplace=True), freed=-N // 8),
    # What the layer keeps itself.
    "new gelu": Layer(NewGELUActivation, freed=3 * 4 * N),
    "quick gelu": Layer(QuickGELUActivation, freed=4 * N),
    "rms norm": Layer(lambda: LlamaRMSNorm(WIDTH)),
    "rms norm from its output": Layer(lambda: LlamaRMSNorm(WIDTH), "tempo"),
    "t5 norm": Layer(lambda: T5LayerNorm(WIDTH)),
    "dropout": Layer(lambda: nn.Dropout(0.3), freed=4 * N - N // 8),
    "dropout by seed": Layer(lambda: nn.Dropout(0.3), {"dropout": "seed"}, 4 * N - 5056),
    "frozen convolution": Layer(frozen(lambda: nn.Conv2d(16, 16, 3, padding=1)), freed=4 * N, shape=IMAGE),
    "frozen batch norm": Layer(in_eval(lambda: nn.BatchNorm2d(16)), shape=IMAGE),
    "max pool": Layer(lambda: nn.MaxPool2d(2), shape=IMAGE),
    "average pool": Layer(lambda: nn.AvgPool2d(2), shape=IMAGE),
    "gated mlp": Layer(lambda: LlamaMLP(LlamaConfig(hidden_size=WIDTH, intermediate_size=64)), freed=2 * 2 * 4 * N),
    "eager attention": Layer(lambda: BertSelfAttention(BertConfig(**EAGER))),
    "block": Layer(lambda: BertLayer(BertConfig(**EAGER, intermediate_size=64))),
    # Not exact.
    "gelu from its output": Layer(nn.GELU, "tempo", 4 * N - N // 8, 2e-3),
    "gelu by precision bit": Layer(nn.GELU, {"activation": "precision_bit"}, 4 * N, 2e-3),
    "gelu by 4 bits": Layer(nn.GELU, {"activation": "few_bit"}, 4 * N - (N // 2 + N // 1024), 0.1),
    "linear in 8 bits": Layer(lambda: nn.Linear(WIDTH, WIDTH), {"storage": "int8"}, None, 0.05),
}
EXACT = [name for name, layer in LAYERS.items() if not layer.error]


class Around(nn.Module):
    """Stock layers around the one under test, each of which keeps its input; the loss is a sum of squares."""

    def __init__(self, layer, shape):
        super().__init__()
        torch.manual_seed(1)
        of_images = shape == IMAGE
        self.before = nn.Conv2d(16, 16, 1) if of_images else nn.Linear(WIDTH, WIDTH)
        self.layer = layer
        self.after = nn.Conv2d(16, 4, 1) if of_images else nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.layer(self.before(x))
        return {"loss": self.after(y[0] if isinstance(y, tuple) else y).square().sum()}


def made(name, device):
    """The model around a stock layer, the same around a patched one, and a batch."""
    layer = LAYERS[name]
    torch.manual_seed(0)
    stock = layer.make().to(device)
    ours = copy.deepcopy(stock)
    patch(ours, layer.config)
    x = random(*layer.shape, device=device)
    return Around(stock, layer.shape).to(device), Around(ours, layer.shape).to(device), x


def step(model, x, run=None):
    model.zero_grad()
    torch.manual_seed(3)
    loss = (run or model)(x.clone().requires_grad_())["loss"]
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
