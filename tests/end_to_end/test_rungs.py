"""Rungs below the floor: what a layer keeps, what it costs, and that no bit of a step changes."""

import contextlib
import copy
import pickle
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave import MemSaveConfig, measure_kept, patch, unpatch
from hf_memsave.errors import ConfigError, PatchError
from hf_memsave.measure.peak import count_peak
from support.families import FAMILIES, MORE, QUOTED, Size, batch_for, build
from support.helpers import halved
from support.lora import adapted, quantized

RUNGS = ("o_proj", "qkv", "up", "gate", "block")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="figures are those of CPU kernels")
pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing.* is deprecated:FutureWarning")

#: What a layer keeps, in bytes a token and H, at LLaMA-3-8B's proportions in bf16: the floor, then each rung.
LEDGER = {None: 23, "o_proj": 21, "qkv": 18, "up": 11, "gate": 4, "block": 2}
#: The same in u a layer: BERT's (and GPT-2's) MLP has one input of an activation, which "up" and "gate" both free.
U = {
    "bert": {None: 10, "o_proj": 9, "qkv": 6, "up": 2, "gate": 2, "block": 1},
    "gpt2": {None: 10, "o_proj": 9, "qkv": 6, "up": 2, "gate": 2, "block": 1},
    "llama": {None: 10.5, "o_proj": 9.5, "qkv": 7.5, "up": 4.75, "gate": 2, "block": 1},
    "phi": {None: 9, "o_proj": 9, "qkv": 6, "up": 2, "gate": 2, "block": 1},
    "phi3": {None: 10.5, "o_proj": 9.5, "qkv": 7.5, "up": 7.5, "gate": 2, "block": 1},
}  # fmt: skip


H = 512


def llama_8b(layers):
    """LLaMA-3-8B's proportions: a quarter of the kv heads, 128 wide, and an MLP 3.5 times as wide."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=H, intermediate_size=7 * H // 2, num_attention_heads=4, num_key_value_heads=1,
        num_hidden_layers=layers, vocab_size=64, max_position_embeddings=128,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).train()


def a_layer(make, batch, config):
    """What one layer keeps: the difference of two depths."""
    kept = []
    for layers in (2, 4):
        model = make(layers)
        patch(model, config)
        kept.append(measure_kept(model, batch(model)).total)
    return (kept[1] - kept[0]) / 2


@on_cpu
@pytest.mark.parametrize("rung", LEDGER)
def test_a_layer_of_llama_8b_keeps_what_the_ledger_says(rung):
    ids = torch.randint(0, 64, (2, 128))
    kept = a_layer(llama_8b, lambda model: {"input_ids": ids, "labels": ids}, MemSaveConfig(checkpoint=rung))
    assert kept / ids.numel() / H == pytest.approx(LEDGER[rung], rel=0.03)


@on_cpu
@pytest.mark.parametrize(("family", "rung"), [(family, rung) for family in U for rung in U[family]], ids=str)
def test_a_layer_keeps_its_rung(family, rung):
    def make(layers):
        return build(family, replace(QUOTED, layers=layers), torch.float32)

    kept = a_layer(make, lambda model: batch_for(model, QUOTED), MemSaveConfig(checkpoint=rung)) / QUOTED.u(4)
    statistics = 0.05  # of attention's rows, and dropout's states
    assert U[family][rung] <= kept <= 1.03 * U[family][rung] + statistics


def flops(model, batch):
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    return counter.get_total_flops()


@on_cpu
@pytest.mark.parametrize("rung", RUNGS)
def test_a_rung_costs_its_products_and_no_more(rung):
    layers, tokens = 2, 16
    ids = torch.randint(0, 64, (1, tokens))
    batch = {"input_ids": ids, "labels": ids}
    model = llama_8b(layers)
    stock = flops(model, batch)
    patch(model, MemSaveConfig(checkpoint=rung))
    added = (flops(model, batch) - stock) / layers
    products = {"o_proj": 1, "qkv": 1.5, "up": 3.5, "gate": 3.5}
    assert (
        added == sum(n for name, n in products.items() if RUNGS.index(name) <= RUNGS.index(rung)) * 2 * tokens * H * H
    )


@on_cpu
@pytest.mark.parametrize(("rung", "times"), [(None, 1), ("gate", 1), ("block", 2)])
def test_attention_runs_again_in_the_last_rung_alone(rung, times):
    ids = torch.randint(0, 64, (1, 16))
    model = llama_8b(3)
    patch(model, MemSaveConfig(checkpoint=rung))
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        model(input_ids=ids, labels=ids).loss.backward()
    calls = [e for e in trace.events() if e.name == "aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert len(calls) == 3 * times


def step(model, batch, is_autocast=False):
    torch.manual_seed(1)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if is_autocast else contextlib.nullcontext():
        loss = model(**batch).loss
    loss.backward()
    return [loss.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]


def assert_equal(ours, stock):
    assert len(ours) == len(stock) > 5
    for a, b in zip(ours, stock, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize(("family", "rung", "mode"), halved(FAMILIES + MORE, RUNGS, ["fp32", "bf16", "autocast"]))
def test_a_step_is_stocks_to_the_bit(family, rung, mode):
    model = build(family, Size(layers=3), torch.bfloat16 if mode == "bf16" else torch.float32)
    batch = batch_for(model, Size(layers=3), padded=True)
    stock = step(model, batch, mode == "autocast")
    patch(model, MemSaveConfig(checkpoint=rung))
    for _ in range(2):
        assert_equal(step(model, batch, mode == "autocast"), stock)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5-decoder"])
def test_a_step_with_lora_is_stocks_to_the_bit(family, rung):
    model = adapted(family, size=Size())
    batch = batch_for(model, Size())
    stock = step(model, batch)
    patch(model, MemSaveConfig(checkpoint=rung))
    assert_equal(step(model, batch), stock)


@pytest.mark.parametrize("has_lora", [False, True], ids=["full", "lora"])
def test_blocks_that_run_again_have_the_bits_of_stock_without_a_cache(has_lora):
    """GPT-2 with its own dropouts: attention is many functions, whose sums depend on how k and v lie in memory."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=64, bos_token_id=0, eos_token_id=0))
    if has_lora:
        lora = LoraConfig(target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
        model = get_peft_model(model, lora)
    ids = torch.randint(0, 64, (4, 128))
    batch, stock = {"input_ids": ids, "labels": ids}, {}
    model.train()
    for model.config.use_cache in (True, False):
        stock[model.config.use_cache] = step(model, batch)
    assert any(a is not None and not torch.equal(a, b) for a, b in zip(*stock.values(), strict=True)), "no cache"
    patch(model, MemSaveConfig(checkpoint="block"))
    for model.config.use_cache in (True, False):
        assert_equal(step(model, batch), stock[False])


def test_blocks_that_run_again_write_twice_to_what_they_write():
    counts = {}
    for name in ("stock", "gate", "block"):
        model = build("llama", Size(), torch.float32)
        block = next(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))
        attention = block.self_attn
        attention.register_buffer("count", torch.zeros(()))
        attention.register_forward_pre_hook(lambda module, _: (module.count.add_(1), None)[1])
        if name != "stock":
            patch(model, MemSaveConfig(checkpoint=name))
        step(model, batch_for(model, Size()))
        counts[name] = attention.count.item()
    assert counts == {"stock": 1, "gate": 1, "block": 2}


#: In u of fp32: x or a bf16 product, h likewise, o; q, k, v, gate and up are in bf16.
NF4 = {None: 6.25, "o_proj": 6, "qkv": 5, "up": 3.625, "gate": 2.25, "block": 1}


@pytest.mark.long
@pytest.mark.parametrize(("rung",), halved(NF4))
def test_nf4_linears_run_again_by_their_own_forward(rung, tmp_path):
    pytest.importorskip("bitsandbytes")

    def make(layers):
        build("llama", replace(QUOTED, layers=layers), torch.bfloat16).save_pretrained(tmp_path / str(layers))
        return quantized(tmp_path / str(layers), 4)

    model = make(2)
    batch = batch_for(model, QUOTED)
    stock = step(model, batch)
    patch(model, MemSaveConfig(checkpoint=rung))
    assert_equal(step(model, batch), stock)
    kept = a_layer(make, lambda model: batch, MemSaveConfig(checkpoint=rung)) / QUOTED.u(4)
    assert NF4[rung] <= kept <= 1.03 * NF4[rung]


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_under_gradient_checkpointing_a_step_is_stocks(family, reentrant):
    model = build(family, Size(layers=3))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    batch = batch_for(model, Size(layers=3))
    stock = step(model, batch)
    patch(model, MemSaveConfig(checkpoint="block"))
    assert_equal(step(model, batch), stock)


@pytest.mark.parametrize("rung", RUNGS)
def test_eager_attention_and_its_dropout_run_as_in_stock(rung):
    model = build("bert", Size())
    model.config.attention_probs_dropout_prob = 0.1
    model.set_attn_implementation("eager")
    for module in model.modules():
        if type(module).__name__ == "BertSelfAttention":
            module.dropout.p = 0.1
    batch = batch_for(model, Size())
    stock = step(model, batch)
    patch(model, MemSaveConfig(checkpoint=rung))
    assert_equal(step(model, batch), stock)


def test_attention_with_dropout_is_kept():
    model = build("bert", Size())
    for module in model.modules():
        if type(module).__name__ == "BertSelfAttention":
            module.dropout.p = 0.1
    batch = batch_for(model, Size())
    stock = step(model, batch)
    patch(model, MemSaveConfig(checkpoint="block"))
    assert_equal(step(model, batch), stock)


@pytest.mark.long
@on_cpu
@pytest.mark.parametrize(("family", "has_lora"), halved(["bert", "llama"], [False, True]))
def test_each_rung_lowers_the_peak_of_a_step(family, has_lora):
    size = Size(hidden=128, heads=4, layers=12, batch=1 if has_lora else 8, seq=128)  # products in bf16 may be slow
    model = adapted(family, size=size) if has_lora else build(family, size)
    batch = batch_for(model, size)
    model(**batch).loss.backward()  # so that gradients are there

    def peak(rung, layers=None):
        patch(model, MemSaveConfig(checkpoint=rung, layers=layers), replace=True)
        return count_peak(lambda: model(**batch).loss.backward()).peak / size.u(2 if has_lora else 4)

    peaks = [peak(rung) for rung in (None, *RUNGS)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.37 * peaks[0]
    assert peaks[-1] < peak("block", {"checkpoint": 6}) < 0.75 * peaks[0]


def test_a_part_of_the_blocks_runs_again():
    model = build("llama", replace(QUOTED, layers=4))
    batch = batch_for(model, QUOTED)
    u, kept = QUOTED.u(4), []
    for layers in ({"checkpoint": 0}, {"checkpoint": 0.5}, {"checkpoint": 3}, {"checkpoint": 1.0}, None):
        patch(model, MemSaveConfig(checkpoint="gate", layers=layers), replace=True)
        kept.append(measure_kept(model, batch).total)
    assert [round((kept[0] - k) / u / 8.5, 1) for k in kept] == [0, 2, 3, 4, 4]


def test_copies_and_pickles_keep_the_rung_and_undo_takes_it_back():
    model = build("llama", Size())
    batch = batch_for(model, Size())
    stock = step(model, batch)
    names = [type(m) for m in model.modules()]
    patch(model, MemSaveConfig(checkpoint="block"))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert measure_kept(again, batch).total == measure_kept(model, batch).total
        assert_equal(step(again, batch), stock)
    unpatch(model)
    assert [type(m) for m in model.modules()] == names
    assert_equal(step(model, batch), stock)


def test_a_weight_written_to_before_backward_raises_as_in_stock():
    model = build("llama", Size())
    patch(model, MemSaveConfig(checkpoint="gate"))
    loss = model(**batch_for(model, Size())).loss
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_adapters_and_sampled_linears_stand_beside_it():
    from hf_memsave import WTACRS

    model = build("llama", Size())
    report = patch(model, MemSaveConfig(checkpoint="gate", linear=WTACRS(targets=("down_proj",), minimum=1)))
    ops = {site.op for site in report.patched}
    assert {"run_again", "wta_crs"} <= ops
    model(**batch_for(model, Size())).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_errors_say_what_was_expected():
    with pytest.raises(ConfigError, match="checkpoint must be one of None, 'o_proj'"):
        MemSaveConfig(checkpoint="down")
    with pytest.raises(ConfigError, match=r"from 0\.0 to 1\.0, got 1\.5"):
        MemSaveConfig(checkpoint="up", layers={"checkpoint": 1.5})
    with pytest.raises(ConfigError, match="whole number of blocks"):
        MemSaveConfig(layers={"norm": 0.5})
    with pytest.raises(PatchError, match="expected linears of a known name"):
        patch(torch.nn.Sequential(torch.nn.Linear(2, 2)), MemSaveConfig(checkpoint="up"))


@pytest.mark.long
@on_cpu
@pytest.mark.parametrize(
    ("family", "has_lora", "how"),
    halved(["bert", "llama"], [False, True], ["checkpoint='block'", "non-reentrant", "reentrant"]),
)
def test_checkpointed_blocks_peak_at_their_inputs_and_one_block(family, has_lora, how):
    """L layers of which each keeps 1u, and the whole step of one layer at the floor; LoRA is PEFT's by default."""
    layers = 8
    size = Size(hidden=128, heads=4, batch=1 if has_lora else 8, seq=128)  # products in bf16 may be slow
    u = size.u(2 if has_lora else 4)

    def peak(number, is_checkpointed):
        at = replace(size, layers=number)
        model = adapted(family, size=at) if has_lora else build(family, at)
        patch(model, MemSaveConfig(checkpoint="block" if is_checkpointed and how.startswith("checkpoint") else None))
        if is_checkpointed and not how.startswith("checkpoint"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": how == "reentrant"})
            model.enable_input_require_grads()
        batch = batch_for(model, at)
        model(**batch).loss.backward()  # so that gradients are there
        return count_peak(lambda: model(**batch).loss.backward()).peak / u

    one, deepest = peak(1, False), peak(layers, True)
    assert (deepest - peak(layers // 2, True)) / (layers // 2) == pytest.approx(1, abs=0.01)
    workspace = (
        3.02  # 0 to 3 are seen: what runs again has its output, and in LLaMA's LoRA an fp32 copy, beside stock's
    )
    assert deepest <= layers - 1 + one + workspace
