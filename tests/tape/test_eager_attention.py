"""Eager attention in patched models: stock's bits, and one tensor of weights per head is kept."""

import pytest
import torch
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel
from transformers.models.bert.modeling_bert import BertSelfAttention

from hf_memsave import MemSaveConfig, measure_kept, patch
from hf_memsave.ops.sampled.eager_attention import NAME
from support.attacks import assert_alike
from support.eager import eager
from support.families import Size, batch_for
from support.helpers import (
    assert_backward_twice,
    assert_gradients_are_right,
    autocasting,
    generator_state,
    only_on_cpu,
    random,
)
from support.steps import assert_same, state_of, step

#: Each its own eager function, or another way to use it: plain, downcast, biased, repeated k and v, a fused projection.
FAMILIES = ("bert", "gpt2", "t5-decoder", "llama", "phi3")
PRECISIONS = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "autocast": (torch.float32, torch.bfloat16),
}
WIDE = Size(seq=48)


def assert_is_exact(make, config=True, autocast=None):
    def run(model):
        with autocasting(model.device, autocast):
            return step(model, batch_for(model, padded=True))

    assert_alike(make, run, config)


# The same bits


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_eager_attention_is_exact(device, family, precision):
    dtype, autocast = PRECISIONS[precision]
    for dropout in (0.0, 0.1):
        assert_is_exact(lambda p=dropout: eager(family, p, dtype, device=device), autocast=autocast)


@pytest.mark.parametrize("trained", ["query", "key", "value"])
def test_eager_attention_is_exact_where_little_is_trained(device, trained):
    def make():
        model = eager("bert", device=device)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
        return model

    assert_is_exact(make)


@pytest.mark.parametrize("family", ["bert", "t5-decoder", "llama"])
def test_eager_attention_is_exact_under_checkpointing_and_for_every_dropout(device, family):
    def make():
        model = eager(family, device=device)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    assert_is_exact(make)
    for how in ("mask", "stock"):
        assert_is_exact(lambda: eager(family, device=device), MemSaveConfig(dropout=how))


def test_eager_attention_is_exact_in_the_model_that_asks_for_it_by_name(device):
    """GPT-2 upcasts and reorders its scores only where its config says "eager"."""
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=512, reorder_and_upcast_attn=True)

    def make():
        model = GPT2LMHeadModel(config).to(device).train()
        model.set_attn_implementation(NAME)
        return model

    assert_is_exact(make)


def own_attention(device, heads=2, dim=2, dropout=0.3):
    """BERT's self-attention in float64, as a function of its input; dropout is the same in each call."""
    config = BertConfig(hidden_size=heads * dim, num_attention_heads=heads, attention_probs_dropout_prob=dropout)
    config._attn_implementation = NAME
    torch.manual_seed(0)
    module = BertSelfAttention(config).to(device, torch.float64).train().requires_grad_(False)

    def call(x):
        torch.manual_seed(1)
        return module(x)[0]

    return call


def test_eager_attention_has_the_right_gradients_and_runs_backward_twice(device):
    assert_gradients_are_right(own_attention(device), random(1, 3, 4, dtype=torch.float64, device=device))
    assert_backward_twice(own_attention(device), random(2, 5, 4, dtype=torch.float64, device=device))


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_eager_attention_returns_the_same_weights(device, family):
    only_on_cpu(device)

    def run(model):
        outputs = model(**batch_for(model, padded=True), output_attentions=True)
        sum(weights.square().sum() for weights in outputs.attentions).backward()
        keys = [m for name, m in model.named_modules() if name.endswith(("key", "k_proj"))]
        assert len(outputs.attentions) == len(keys) == 2
        return [*outputs.attentions, *(m.weight.grad for m in keys)]

    assert_alike(lambda: eager(family, device=device), run)


# What is kept


def kept_by_models(device, family, p, dtype=torch.float32, **config):
    """What a patched model keeps with eager attention, and with SDPA without dropout."""
    model = eager(family, p, dtype, WIDE, device)
    other, batch = eager(family, 0.0, dtype, WIDE, device), batch_for(model, WIDE, padded=True)
    other.set_attn_implementation("sdpa")
    for patched in (model, other):
        patch(patched, MemSaveConfig(**config))
    return measure_kept(model, batch), measure_kept(other, batch).total


N = WIDE.batch * WIDE.heads * WIDE.seq**2
#: The log of each row's sum, which SDPA keeps.
LSE = WIDE.batch * WIDE.heads * WIDE.seq * 4
#: The number that scores are scaled by, and the one that masks are filled with.
SCALE, FILLING = 8, 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("family", "dropout"), [("bert", 0.1), ("gpt2", 0.0), ("gpt2", 0.1), ("phi", 0.1), ("llama", 0.0), ("phi3", 0.1)]
)
def test_eager_attention_keeps_one_tensor_of_weights_beyond_what_sdpa_keeps(device, family, dropout, dtype):
    """Of llama's k and v as they were before they were repeated, and of phi3's fused projection, no more than SDPA."""
    only_on_cpu(device, "what SDPA keeps")
    here, sdpa = kept_by_models(device, family, dropout, dtype)
    of_weights = [s.nbytes for s in here.storages if s.nbytes in (N, 2 * N, 4 * N)]
    assert of_weights == WIDE.layers * [dtype.itemsize * N], "one tensor a layer, in the dtype of the scores"
    of_state = generator_state(device).nbytes if dropout else 0
    assert here.total - sdpa <= WIDE.layers * (dtype.itemsize * N - LSE + of_state + SCALE) + FILLING


def test_eager_attention_keeps_of_dropout_what_is_asked_for(device):
    only_on_cpu(device, "what a mask takes")
    n, of_state = WIDE.layers * N, WIDE.layers * generator_state(device).nbytes
    expected = {"seed": of_state, "mask": n // 8, "stock": 4 * n + 4 * n}  # the noise, and what it made of the weights
    for how, nbytes in expected.items():
        here, without = (kept_by_models(device, "bert", p, dropout=how)[0].total for p in (0.1, 0.0))
        assert here - without == nbytes


def test_eager_attention_leaves_a_forward_of_another_tool_in_place(device):
    model = eager("bert", device=device)
    batch = batch_for(model, padded=True)
    expected = step(model, batch)
    module = model.bert.encoder.layer[0].attention.self
    stock, seen = type(module).forward, []
    module.forward = lambda *args, **kwargs: seen.append(1) or stock(module, *args, **kwargs)
    patch(model)
    assert_same(step(model, batch), expected)
    assert seen


@pytest.mark.parametrize("family", ["t5-decoder", "llama"])
def test_eager_attention_generates_the_same_tokens_and_is_undone(device, family):
    model = eager(family, device=device)
    batch = batch_for(model, padded=True)

    def generated():
        ids = batch_for(model, padded=False)["input_ids"]
        tokens = model.eval().generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
        model.train()
        return tokens

    before, expected, tokens = state_of(model), step(model, batch), generated()
    report = patch(model)
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {NAME}
    assert torch.equal(generated(), tokens)
    report.undo()
    assert state_of(model) == before
    assert_same(step(model, batch), expected)
