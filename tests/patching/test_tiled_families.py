"""Families in tiles, each beside stock and float64; routers, and code that asks how many tokens there are."""

import copy
import importlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_memsave import MemSaveConfig, patch
from hf_memsave.logs import warn_once
from support.helpers import MATRIX
from support.steps import step
from support.tiled import SIZE, TILE, reasons
from support.zoo import batch_for, build

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
#: Text decoders, experts, encoders and both, sound, images, images with text.
FAMILIES = "qwen3 phi3 opt qwen3_moe gpt_oss deepseek_v3 modernbert t5gemma whisper vit clip".split()
MORE = (
    "mistral qwen2 gemma olmo2 glm4 cohere starcoder2 gpt_neox qwen2_moe olmoe ernie4_5_moe roberta electra "
    "xlm-roberta esm distilbert mbart pegasus marian deit dinov2 siglip m2m_100 audio-spectrogram-transformer"
).split()


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("tiles")


@pytest.mark.long
@pytest.mark.parametrize("model_type", [*FAMILIES, *(pytest.param(one, marks=MATRIX) for one in MORE)])
def test_loss_is_stocks_and_gradients_are_as_near_to_float64(bench, model_type):
    model, batch = bench.small_model(model_type)
    row = bench.Row(model_type)
    bench.compare(row, model, batch, MemSaveConfig(tiles=11), 2, bench.step(copy.deepcopy(model), batch)[0], ["fp32"])
    assert (row.tiled > 0, row.loss, row.broken) == (True, "equal", []), row


# What mixes tokens


class Own(LlamaMLP):
    """``run`` of stock's function and x."""

    def forward(self, x):
        return self.run(super().forward, x)


def llama(run=None, layers=(1,), **fields):
    """In float64; these layers have an MLP of their own."""
    model = build("llama", SIZE, torch.float64, **fields)
    for number in layers if run else ():
        mlp = model.model.layers[number].mlp
        mlp.__class__, mlp.run = Own, run
    return model


def batch_of(model, tokens=SIZE.seq, **more):
    batch = batch_for(model, SIZE)
    return {name: batch[name][:, :tokens] for name in ("input_ids", "labels")} | more


def assert_stocks(found, expected, rtol=1e-9, atol=1e-12):
    assert torch.equal(found["loss"], expected["loss"]) and len(expected) > 10
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def before(x, tokens):
    """Of each token, the one so many before."""
    return F.pad(x, (0, 0, tokens, 0))[:, :-tokens]


def with_capacity(mlp, x):
    """A mixture of experts, each of which takes no more than its part of the tokens: integers alone mix them."""
    choice = x[..., :2].argmax(-1, keepdim=True)
    place = F.one_hot(choice[..., 0], 2).cumsum(1).gather(-1, choice)
    return torch.where(place <= x.shape[1] // 2 + 1, mlp(x), 0)


def better_half(mlp, x):
    scores = x.sum(-1)
    return mlp(x) * (scores >= scores.median(1, keepdim=True).values)[..., None]


#: What an MLP does -> why it runs as a whole, and tokens of a tile.
MIXING = {
    "the token before": (lambda mlp, x: mlp(x + before(x, 1)), "changes others", TILE),
    "one 20 before": (lambda mlp, x: mlp(x + before(x, 20)), "changes others", TILE),
    "the mean": (lambda mlp, x: mlp(x - x.mean(1, keepdim=True)), "changes others", TILE),
    "the mean, through what lets no NaN pass": (
        lambda mlp, x: mlp(x) * (1 + torch.nan_to_num(x).mean(1, keepdim=True)), "changes others", TILE
    ),
    "capacity": (with_capacity, "others", TILE),
    "drawing": (lambda mlp, x: mlp(x * torch.rand_like(x)), "random numbers", TILE),
    "counting from the first": (
        lambda mlp, x: mlp(x * torch.arange(x.shape[1])[:, None]), "how many others", TILE
    ),
    "the last": (lambda mlp, x: torch.cat([mlp(x[:, :-1]), 2 * mlp(x[:, -1:])], dim=1), "other", 10),
    "the count": (lambda mlp, x: mlp(x / x.shape[1]), "other", 10),
    "softmax": (lambda mlp, x: mlp(x.softmax(1)), "other", 10),
    "half": (better_half, "other", 10),
    "far on both sides": (
        lambda mlp, x: mlp(x + F.conv1d(x.mT, x.new_ones(32, 1, 3), padding=16, dilation=16, groups=32).mT), "other", 10
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_tokens_beside_attention_runs_as_a_whole_and_says_so(name, caplog):
    run, why, tile = MIXING[name]
    model = llama(run)
    batch = batch_of(model)
    expected = step(model, batch)
    warn_once.cache_clear()
    report = patch(model, tiles=tile)
    assert_stocks(step(model, batch), expected)
    assert [reason is None for reason in reasons(model)] == [True, False] and why in reasons(model)[1]
    assert why in caplog.text and why in str(report)


#: Another attention, of few tokens another; and what runs on no 17 tokens.
SHOWN = {
    "is_causal": lambda mlp, x: F.scaled_dot_product_attention(mlp(x), x, x, is_causal=x.shape[1] > 25),
    "fails on a part": lambda mlp, x: mlp(x) if x.shape[1] != 17 else x.reshape(-1, 5),
}


@pytest.mark.parametrize("tokens", [None, 64], ids=["as the plan is made", "later"])
@pytest.mark.parametrize("why", SHOWN)
def test_what_only_a_tile_of_this_length_shows_runs_as_a_whole(why, tokens):
    model = llama(SHOWN[why], [0], num_hidden_layers=1)
    batch = batch_of(model, 34)  # two tiles of 17
    expected = step(model, batch)
    patch(model, tiles=33)
    if tokens is not None:
        step(model, batch_of(model, tokens))
        assert reasons(model) == [None]
    assert_stocks(step(model, batch), expected)
    assert len(reasons(model)) == 1 and why in reasons(model)[0]


def test_routers_losses_are_stocks():
    """Routers' logits come by hooks, in the first step or in a later one."""
    stock = build("mixtral", SIZE, torch.float64)
    stock.set_experts_implementation("eager")
    ours = copy.deepcopy(stock)
    patch(ours, tiles=10)
    for more in ({}, {"output_router_logits": True}, {}):
        batch = batch_of(stock, **more)
        assert_stocks(step(ours, batch), step(stock, batch))
    assert None in reasons(ours)


@pytest.mark.parametrize("tiles", [1, 7, 31])
@pytest.mark.parametrize("tokens", [32, 48])
def test_numbers_of_tokens_that_are_other_sizes_too(tiles, tokens):
    """32 is the hidden size as well, 48 the MLP's; the last tile may be one token."""
    stock = llama(intermediate_size=48)
    ours = copy.deepcopy(stock)
    patch(ours, tiles=tiles)
    torch.manual_seed(3)
    more = {"attention_mask": (torch.arange(tokens) >= torch.tensor([[0], [9]])).long(), "use_cache": False}
    results = []
    for model in (ours, stock):
        inputs = torch.randn(2, tokens, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        loss = model(inputs_embeds=inputs.requires_grad_(), **more).logits.square().mean()
        loss.backward()
        results.append([loss, inputs.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert torch.equal(results[0][0], results[1][0]) and reasons(ours) == [None, None]
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)
