"""Families in tiles, each beside stock and float64; routers, and code that asks how many tokens there are."""

import copy
import importlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_memsave import MemSaveConfig, patch
from hf_memsave.patching.tiled import PLANS

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
#: Text decoders, encoders and both, experts, images, sound, images with text.
FAMILIES = (
    "mistral qwen2 qwen3 phi3 gemma olmo2 glm4 cohere starcoder2 gpt_neox opt "
    "qwen3_moe qwen2_moe olmoe gpt_oss deepseek_v3 ernie4_5_moe "
    "roberta electra xlm-roberta modernbert esm distilbert "
    "mbart pegasus marian t5gemma whisper vit deit dinov2 siglip m2m_100 audio-spectrogram-transformer clip"
).split()


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("tiles")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_loss_is_stocks_and_gradients_are_as_near_to_float64(bench, model_type):
    model, batch = bench.small_model(model_type)
    row = bench.Row(model_type)
    bench.compare(row, model, batch, MemSaveConfig(tiles=11), 2, bench.step(copy.deepcopy(model), batch)[0], ["fp32"])
    assert (row.tiled > 0, row.loss, row.broken) == (True, "equal", []), row


class Asking(LlamaMLP):
    """Code that decides by the number of tokens, or by the last one."""

    how = ""

    def forward(self, x):
        if self.how == "last":
            return torch.cat([super().forward(x[:, :-1]), 2 * super().forward(x[:, -1:])], dim=1)
        if self.how == "count":
            return super().forward(x / x.shape[1])
        if self.how == "softmax":
            return super().forward(x.softmax(1))
        if self.how == "half":
            scores = x.sum(-1)
            return super().forward(x) * (scores >= scores.median(1, keepdim=True).values)[..., None]
        return super().forward(x + F.conv1d(x.mT, x.new_ones(32, 1, 3), padding=16, dilation=16, groups=32).mT)


def llama(cls=transformers.LlamaForCausalLM, **fields):
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    return cls(cls.config_class(**sizes, num_key_value_heads=2, pad_token_id=0, **fields)).double().train()


def step(model, **more):
    model.zero_grad()
    torch.manual_seed(1)
    ids = torch.randint(3, 64, (2, 48))
    out = model(input_ids=ids, labels=ids, **more)
    out.loss.backward()
    return out.loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_stocks(ours, stock, **more):
    (loss, found), (expected, gradients) = step(ours, **more), step(stock, **more)
    assert torch.equal(loss, expected) and len(gradients) > 10
    torch.testing.assert_close(found, gradients, rtol=1e-9, atol=1e-12)


def reasons(model: nn.Module) -> list[str | None]:
    return [plan.why_not for m in model.modules() for plan in m.__dict__.get(PLANS, {}).values()]


@pytest.mark.parametrize("how", ["last", "count", "softmax", "half", "far"])
def test_code_that_asks_for_other_tokens_runs_as_a_whole(how):
    stock = llama()
    for layer in stock.model.layers:
        layer.mlp.__class__, layer.mlp.how = Asking, how
    ours = copy.deepcopy(stock)
    patch(ours, tiles=10)
    assert_stocks(ours, stock)
    assert all("other" in str(why) for why in reasons(ours)) and len(reasons(ours)) == 2


def test_routers_losses_are_stocks():
    """Routers' logits come by hooks, in the first step or in a later one."""
    stock = llama(transformers.MixtralForCausalLM, num_local_experts=4)
    stock.set_experts_implementation("eager")
    ours = copy.deepcopy(stock)
    patch(ours, tiles=10)
    for more in ({}, {"output_router_logits": True}, {}):
        assert_stocks(ours, stock, **more)
    assert None in reasons(ours)


@pytest.mark.parametrize("tiles", [1, 7, 31])
@pytest.mark.parametrize("tokens", [32, 48])
def test_numbers_of_tokens_that_are_other_sizes_too(tiles, tokens):
    """32 is the hidden size as well, 48 the MLP's; the last tile may be one token."""
    stock = llama()
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
