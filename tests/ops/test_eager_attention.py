"""``eager_attention``: the bits of the model's own eager attention, of which one tensor of weights per head is kept."""

import copy

import pytest
import torch
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel
from transformers.models.bert.modeling_bert import BertSelfAttention

from hf_memsave import MemSaveConfig, measure_kept, patch
from hf_memsave.ops.eager_attention import NAME, kept_bytes
from support.eager import eager, ops_of
from support.families import Size, batch_for, build
from support.helpers import (
    assert_backward_twice,
    assert_gradients_are_right,
    assert_same_bits,
    autocasting,
    generator_state,
    only_on_cpu,
    random,
    swapped,
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


def pair(*args, config=True, **options):
    """The same model, patched and stock."""
    stock = eager(*args, **options)
    ours = copy.deepcopy(stock)
    patch(ours, config)
    return ours, stock


# The same bits


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_eager_attention_is_exact(device, family, precision, dropout):
    dtype, autocast = PRECISIONS[precision]
    ours, stock = pair(family, dropout, dtype, device=device)
    batch = batch_for(stock, padded=True)
    with autocasting(device, autocast):
        assert_same(step(ours, batch), step(stock, batch))


@pytest.mark.parametrize("how", ["mask", "stock"])
def test_eager_attention_is_exact_for_every_dropout(device, how):
    ours, stock = pair("llama", device=device, config=MemSaveConfig(dropout=how))
    batch = batch_for(stock, padded=True)
    assert_same(step(ours, batch), step(stock, batch))


@pytest.mark.parametrize("trained", ["query", "key", "value"])
def test_eager_attention_is_exact_where_little_is_trained(device, trained):
    ours, stock = pair("bert", device=device)
    for model in (ours, stock):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
    batch = batch_for(stock, padded=True)
    assert_same(step(ours, batch), step(stock, batch))


@pytest.mark.parametrize("family", ["bert", "t5-decoder", "llama"])
def test_eager_attention_is_exact_under_checkpointing(device, family):
    ours, stock = pair(family, device=device)
    for model in (ours, stock):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = batch_for(stock, padded=True)
    assert_same(step(ours, batch), step(stock, batch))


def test_eager_attention_is_exact_in_the_model_that_asks_for_it_by_name(device):
    """GPT-2 upcasts and reorders its scores only where its config says "eager"."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=512, reorder_and_upcast_attn=True)
    stock = GPT2LMHeadModel(config).to(device).train()
    stock.set_attn_implementation(NAME)
    ours = copy.deepcopy(stock)
    assert "eager_attention" in ops_of(patch(ours))
    batch = batch_for(stock, padded=True)
    assert_same(step(ours, batch), step(stock, batch))


def own_attention(device, heads=2, dim=2, dropout=0.3):
    """BERT's self-attention in float64, patched, as a function of its input; dropout is the same in each call."""
    config = BertConfig(hidden_size=heads * dim, num_attention_heads=heads, attention_probs_dropout_prob=dropout)
    config._attn_implementation = NAME
    torch.manual_seed(0)
    module = BertSelfAttention(config).to(device, torch.float64).train().requires_grad_(False)
    swapped(module, "eager_attention", MemSaveConfig())

    def call(x):
        torch.manual_seed(1)
        return module(x)[0]

    return call


def test_eager_attention_has_the_right_gradients(device):
    assert_gradients_are_right(own_attention(device), random(1, 3, 4, dtype=torch.float64, device=device))


def test_eager_attention_runs_backward_twice(device):
    assert_backward_twice(own_attention(device), random(2, 5, 4, dtype=torch.float64, device=device))


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_eager_attention_returns_the_same_weights(device, family):
    only_on_cpu(device)
    ours, stock = pair(family, device=device)
    batch, found = batch_for(stock, padded=True), []
    for model in (ours, stock):
        torch.manual_seed(3)
        outputs = model(**batch, output_attentions=True)
        sum(weights.square().sum() for weights in outputs.attentions).backward()
        keys = [m for name, m in model.named_modules() if name.endswith(("key", "k_proj"))]
        found.append([*outputs.attentions, *(m.weight.grad for m in keys)])
    assert len(found[0]) == 4
    for mine, theirs in zip(*found, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("family", ["t5-decoder", "llama"])
def test_eager_attention_generates_the_same_tokens(device, family):
    ours, stock = pair(family, device=device)
    ids = batch_for(stock, padded=False)["input_ids"]
    got, expected = (
        m.eval().generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None) for m in (ours, stock)
    )
    assert torch.equal(got, expected)


# What is kept


def kept_by_models(device, family, p, dtype=torch.float32, **config):
    """What a patched model keeps without this op, and with it."""
    model = eager(family, p, dtype, WIDE, device)
    batch, found = batch_for(model, WIDE, padded=True), []
    for value in ("stock", "recompute"):
        patch(model, MemSaveConfig(attention=value, **config))
        found.append(measure_kept(model, batch))
    return found


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    ("family", "dtype", "softmax_itemsize"),
    [("bert", torch.float32, 4), ("bert", torch.bfloat16, 2), ("gpt2", torch.float32, 4), ("phi", torch.bfloat16, 4)],
)
def test_eager_attention_keeps_what_it_claims(device, family, dtype, softmax_itemsize, dropout):
    stock, ours = kept_by_models(device, family, dropout, dtype)
    shape = (WIDE.batch, WIDE.heads, WIDE.seq, WIDE.seq)
    claim = kept_bytes(shape, dtype.itemsize, softmax_itemsize, dropout > 0, device.type)
    assert stock.total - ours.total == WIDE.layers * (claim.eager - claim.here)
    n = torch.Size(shape).numel()
    of_weights = [s.nbytes for s in ours.storages if s.nbytes in (n, 2 * n, 4 * n)]
    assert of_weights == WIDE.layers * [softmax_itemsize * n], "one tensor a layer, in softmax's dtype"
    assert claim.here - softmax_itemsize * n == (generator_state(device).nbytes if dropout else 0)


def test_eager_attention_keeps_k_and_v_as_they_were_before_they_were_repeated(device):
    stock, ours = kept_by_models(device, "llama", p=0.0)
    assert stock.total - ours.total == WIDE.layers * 2 * WIDE.u(4) // 2  # half the heads


def test_eager_attention_does_not_let_v_hold_a_fused_projection(device):
    stock, ours = kept_by_models(device, "phi3", p=0.0)
    assert stock.total - ours.total == WIDE.layers * 2 * WIDE.u(4) // 2


def test_eager_attention_keeps_of_dropout_what_is_asked_for(device):
    n = WIDE.layers * WIDE.batch * WIDE.heads * WIDE.seq**2
    found = {how: kept_by_models(device, "bert", 0.1, dropout=how) for how in ("seed", "mask", "stock")}
    freed = {how: stock.total - ours.total for how, (stock, ours) in found.items()}
    of_noise, of_state = (4 if device.type == "cpu" else 1) * n, WIDE.layers * generator_state(device).nbytes
    assert freed == {"seed": of_noise + 4 * n - of_state, "mask": of_noise + 4 * n - n // 8, "stock": 0}


# Patching


def test_eager_attention_is_reported(device):
    report = patch(eager("bert", device=device))
    assert "patched     2 x eager_attention    BertSelfAttention" in str(report)


def test_eager_attention_stays_stock_where_asked(device):
    model = eager("bert", device=device)
    report = patch(model, MemSaveConfig(attention="stock"))
    assert "eager_attention" not in ops_of(report)
    (reason,) = {site.reason for site in report.skipped if site.op == "eager_attention"}
    assert "attention='stock'" in reason


@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2"])
def test_eager_attention_leaves_other_attention_alone(device, name):
    model = build("bert").to(device)
    model.config._attn_implementation_internal = name
    assert "eager_attention" not in {site.op for site in patch(model).sites}


def test_eager_attention_leaves_a_forward_of_another_tool_in_place(device):
    model = eager("bert", device=device)
    module = model.bert.encoder.layer[0].attention.self
    stock = type(module).forward
    module.forward = lambda *args, **kwargs: stock(module, *args, **kwargs)
    report = patch(model)
    (site,) = (site for site in report.skipped if site.op == "eager_attention")
    assert site.name == "bert.encoder.layer.0.attention.self"
    assert "its forward was set by" in site.reason


@pytest.mark.parametrize("family", ["t5-decoder", "llama"])
def test_eager_attention_is_undone(device, family):
    model = eager(family, device=device)
    batch = batch_for(model, padded=True)
    before, expected = state_of(model), step(model, batch)
    report = patch(model)
    assert "eager_attention" in ops_of(report)
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {NAME}
    report.undo()
    assert state_of(model) == before
    assert_same(step(model, batch), expected)
