"""Another default device than the model's, in forward and backward or in one of them: "meta" stands for "cuda"."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_memsave import MemSaveConfig, patch
from support.families import Size, build
from support.helpers import assert_same_bits, only_on_cpu, random

SIZE = Size(hidden=32, heads=2, layers=2, batch=2, seq=12)
#: Where the default device is another one: in forward, in backward.
WHERE = {"both": (True, True), "forward": (True, False), "backward": (False, True)}
FACTORIES = {
    "arange": lambda: torch.arange(4096.0).view(64, 64),
    "zeros": lambda: torch.zeros(64, 64),
    "ones": lambda: torch.ones((64, 64)),
    "full": lambda: torch.full((64, 64), 0.5),
    "tril": lambda: torch.tril(torch.ones(64, 64)),
    "said": lambda: torch.ones(64, 64, device="meta"),
}


@pytest.fixture(autouse=True)
def on_cpu(device):
    only_on_cpu(device)


def elsewhere(is_other):
    return torch.device("meta") if is_other else contextlib.nullcontext()


def run(model, forward, where):
    with elsewhere(WHERE[where][0]):
        loss = forward(model)
    with elsewhere(WHERE[where][1]):
        loss.backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    "config", [MemSaveConfig(), MemSaveConfig(dropout="mask"), MemSaveConfig(offload=True)], ids=str
)
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_model_on_cpu_has_stocks_bits(family, config, where):
    def layers(model):
        return model.base_model.encoder.layer if family == "bert" else model.base_model.h

    def forward(model):
        torch.manual_seed(1)
        hidden = x.clone()
        for layer in layers(model):
            hidden = layer(hidden)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return hidden.square().mean()

    x = random(SIZE.batch, SIZE.seq, SIZE.hidden)
    stock, ours = build(family, SIZE), build(family, SIZE)
    for layer in layers(ours):
        patch(layer, config)
    for mine, theirs in zip(run(ours, forward, where), run(stock, forward, where), strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert_same_bits(mine, theirs)


class Made(nn.Module):
    def __init__(self, make, device):
        super().__init__()
        self.a, self.b = (nn.Linear(64, 64, device=device) for _ in range(2))
        self.make = make

    def forward(self, x):
        return self.b(F.silu(self.a(x) * torch.cos(self.make())))


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("name", FACTORIES)
def test_what_is_made_of_numbers_stays_where_it_was(name, backward):
    model = Made(FACTORIES[name], "meta")
    patch(model)
    with torch.device("meta"):
        loss = model(torch.randn(64, 64)).square().mean()
    with elsewhere(backward):
        loss.backward()
    assert all(p.grad.is_meta for p in model.parameters())


@pytest.mark.parametrize("name", FACTORIES)
def test_what_a_cpu_model_makes_is_made_again_on_cpu(name):
    if name == "said":
        pytest.skip("does not apply: it is elsewhere")
    grads = []
    for is_patched in (False, True):
        torch.manual_seed(0)
        model = Made(FACTORIES[name], "cpu")
        if is_patched:
            patch(model)
        loss = model(torch.randn(64, 64)).square().mean()
        with torch.device("meta"):
            loss.backward()
        grads.append([p.grad for p in model.parameters()])
    for mine, theirs in zip(*grads, strict=True):
        assert_same_bits(mine, theirs)
