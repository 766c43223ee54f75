"""Another default device or dtype than the model's, in forward, in backward or in both: "meta" stands for "cuda"."""

import contextlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import DebertaV2Config, DebertaV2ForMaskedLM

from support.attacks import WIDTH, Attack, assert_alike
from support.helpers import on_cpu_alone, random
from support.steps import backward, patched
from support.zoo import Size, build

SIZE = Size(hidden=32, heads=2, layers=2, batch=2, seq=12)
FACTORIES = {
    "arange": lambda: torch.arange(4096.0).view(64, 64), "ones": lambda: torch.ones((64, 64)),
    "tril": lambda: torch.tril(torch.full((64, 64), 0.5)), "said": lambda: torch.ones(64, 64, device="meta"),
}  # fmt: skip
on_cpu = on_cpu_alone()


def elsewhere(is_other):
    return torch.device("meta") if is_other else contextlib.nullcontext()


@pytest.mark.parametrize(
    ("forward", "in_backward", "config"),
    [(True, True, {}), (True, False, {"dropout": "mask"}), (False, True, {"offload": True})],
)
def test_a_model_on_cpu_has_stocks_bits(forward, in_backward, config):
    x = random(SIZE.batch, SIZE.seq, SIZE.hidden)

    def run(layers):
        hidden = x.clone()
        with elsewhere(forward):
            for layer in layers:
                hidden = layer(hidden)
                hidden = hidden[0] if isinstance(hidden, tuple) else hidden
            loss = hidden.square().mean()
        with elsewhere(in_backward):
            return backward(layers, loss)

    assert_alike(lambda: build("bert", SIZE).base_model.encoder.layer, run, config, of_each=True)
    assert_alike(lambda: build("gpt2", SIZE).base_model.h, run, config, of_each=True)


def made(name, device):
    fn = lambda model, x: model.b(F.silu(model.a(x) * torch.cos(FACTORIES[name]())))  # noqa: E731
    return Attack(fn, a=nn.Linear(64, 64), b=nn.Linear(64, 64)).to(device)


@pytest.mark.parametrize("name", FACTORIES)
def test_what_is_made_of_numbers_stays_where_it_was(name):
    for in_backward in (True, False):
        model = patched(made(name, "meta"))
        with torch.device("meta"):
            loss = model(torch.randn(64, 64)).square().mean()
        with elsewhere(in_backward):
            loss.backward()
        assert all(p.grad.is_meta for part in (model.a, model.b) for p in part.parameters())

    def run(model):
        loss = model(torch.randn(64, 64)).square().mean()
        with torch.device("meta"):
            return backward(model, loss)

    if name != "said":
        assert_alike(lambda: made(name, "cpu"), run)


# A default dtype that holds for the forward alone: what is made of whole numbers has it in backward too.


def of_counts(model, x):
    share = torch.arange(300, 300 + WIDTH, device=x.device) / 7
    return model.f(x) * share.sqrt().sin() + torch.ones(WIDTH, device=x.device) * model.f(x).tanh()


def stepped(model, forward, dtype, later=torch.float32):
    try:
        torch.set_default_dtype(dtype)
        loss = forward(model)
        torch.set_default_dtype(later)
        found = backward(model, loss)
        assert torch.get_default_dtype() is later
    finally:
        torch.set_default_dtype(torch.float32)
    return found


@pytest.mark.parametrize(("dtype", "later"), [(torch.float16, torch.float32), (torch.float64, torch.bfloat16)])
def test_what_is_made_of_whole_numbers_keeps_its_dtype(dtype, later):
    x = random(4, WIDTH, dtype=dtype)
    run = partial(stepped, forward=lambda model: model(x).square().sum(), dtype=dtype, later=later)
    assert_alike(lambda: Attack(of_counts).to(dtype), run)


def test_deberta_in_bf16():
    config = DebertaV2Config(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8, max_position_embeddings=32,
    )  # fmt: skip
    ids = torch.randint(3, 97, (2, 12))
    run = partial(stepped, forward=lambda model: model(input_ids=ids, labels=ids).loss, dtype=torch.bfloat16)
    assert_alike(lambda: DebertaV2ForMaskedLM(config).to(torch.bfloat16), run)
