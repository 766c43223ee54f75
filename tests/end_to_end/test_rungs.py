"""Rungs below the floor: what a layer keeps, what it costs, no bit of a step changes, and no class of a linear."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.ao.quantization import quantize_dynamic
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave import WTACRS, MemSaveConfig, measure_kept, patch, unpatch
from hf_memsave.errors import ConfigError, PatchError
from hf_memsave.measure.peak import count_peak
from support.families import FAMILIES, MODES, MORE, QUOTED, Size, batch_for, build, step_in
from support.helpers import MATRIX, halved
from support.lora import adapted, quantized
from support.steps import assert_same, step

RUNGS = ("o_proj", "qkv", "up", "gate", "block")
SIZE = Size()
GATE = MemSaveConfig(checkpoint="gate")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="figures are those of CPU kernels")
pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing.* is deprecated:FutureWarning")

#: What a layer keeps, in bytes a token and H, at LLaMA-3-8B's proportions in bf16: the floor, then each rung.
LEDGER = {None: 23, "o_proj": 21, "qkv": 18, "up": 11, "gate": 4, "block": 2}
#: In u a layer: BERT's (and GPT-2's) MLP has one input of an activation, which "up" and "gate" both free.
U = {
    "bert": (10, 9, 6, 2, 2, 1),
    "gpt2": (10, 9, 6, 2, 2, 1),
    "llama": (10.5, 9.5, 7.5, 4.75, 2, 1),
    "phi": (9, 9, 6, 2, 2, 1),
    "phi3": (10.5, 9.5, 7.5, 7.5, 2, 1),
}
#: In u of fp32: x or a bf16 product, h likewise, o; q, k, v, gate and up are in bf16.
NF4 = {None: 6.25, "o_proj": 6, "qkv": 5, "up": 3.625, "gate": 2.25, "block": 1}
H = 512


def llama_8b(layers):
    """LLaMA-3-8B's proportions: a quarter of the kv heads, 128 wide, and an MLP 3.5 times as wide."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=H, intermediate_size=7 * H // 2, num_attention_heads=4, num_key_value_heads=1,
        num_hidden_layers=layers, vocab_size=64, max_position_embeddings=128,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).train()


def tokens(*shape):
    ids = torch.randint(0, 64, shape)
    return {"input_ids": ids, "labels": ids}


def llama():
    model = build("llama", SIZE)
    return model, batch_for(model, SIZE)


def layer_by_rung(make, batch, rungs):
    """What one layer keeps by each rung: the difference of two depths."""
    kept = []
    for layers in (2, 4):
        model, kept_here = make(layers), []
        for rung in rungs:
            patch(model, MemSaveConfig(checkpoint=rung), replace=True)
            kept_here.append(measure_kept(model, batch(model)).total)
        kept.append(kept_here)
    return [(deep - flat) / 2 for flat, deep in zip(*kept, strict=True)]


@on_cpu
def test_a_layer_of_llama_8b_keeps_what_the_ledger_says():
    batch = tokens(2, 128)
    kept = layer_by_rung(llama_8b, lambda model: batch, LEDGER)
    assert [k / 256 / H for k in kept] == [pytest.approx(expected, rel=0.03) for expected in LEDGER.values()]


@on_cpu
@pytest.mark.parametrize("family", U)
def test_a_layer_keeps_its_rung(family):
    def make(layers):
        return build(family, replace(QUOTED, layers=layers))

    kept = layer_by_rung(make, lambda model: batch_for(model, QUOTED), LEDGER)
    statistics = 0.05  # of attention's rows, and dropout's states
    for rung, expected, found in zip(LEDGER, U[family], kept, strict=True):
        assert expected <= found / QUOTED.u(4) <= 1.03 * expected + statistics, rung


@on_cpu
def test_a_rung_costs_its_products_and_no_more():
    model, batch, length, counts = llama_8b(2), tokens(1, 16), 16, []
    for rung in (None, *RUNGS):
        patch(model, MemSaveConfig(checkpoint=rung), replace=True)
        with FlopCounterMode(display=False) as counter:
            model(**batch).loss.backward()
        counts.append(counter.get_total_flops())
    unpatch(model)
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    assert counts[0] == counter.get_total_flops()
    products = [(count - counts[0]) / 2 / (2 * length * H * H) for count in counts]
    assert products == [0, 1, 2.5, 6, 9.5, 9.5]  # o; q, k and v; up; gate


@on_cpu
def test_attention_runs_again_in_the_last_rung_alone():
    model, batch, calls = llama_8b(3), tokens(1, 16), []
    for rung in (None, "gate", "block"):
        patch(model, MemSaveConfig(checkpoint=rung), replace=True)
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            model(**batch).loss.backward()
        calls.append(sum(e.name == "aten::_scaled_dot_product_flash_attention_for_cpu" for e in trace.events()))
    assert calls == [3, 3, 6]


def assert_rungs_are_stocks(model, batch, rungs=RUNGS, mode="fp32"):
    stock = step_in(mode, model, batch)
    for rung in rungs:
        patch(model, MemSaveConfig(checkpoint=rung), replace=True)
        for _ in range(2):
            assert_same(step_in(mode, model, batch), stock)


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=MATRIX)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES + MORE)
def test_a_step_is_stocks_to_the_bit(family, mode, half):
    """Of families x modes x rungs every second combination, which is every pair."""
    start = ((FAMILIES + MORE).index(family) + list(MODES).index(mode) + half) % 2
    model = build(family, Size(layers=3), MODES[mode])
    assert_rungs_are_stocks(model, batch_for(model, Size(layers=3), padded=True), RUNGS[start::2], mode)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5-decoder"])
def test_a_step_with_lora_is_stocks_to_the_bit(family):
    model = adapted(family, size=SIZE)
    assert_rungs_are_stocks(model, batch_for(model, SIZE))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attentions_own_dropout_runs_as_in_stock(implementation):
    """SDPA with dropout is kept, and not run again."""
    model = build("bert", SIZE)
    model.set_attn_implementation(implementation)
    for module in model.modules():
        if type(module).__name__ == "BertSelfAttention":
            module.dropout.p = 0.1
    assert_rungs_are_stocks(model, batch_for(model, SIZE))


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_under_gradient_checkpointing_a_step_is_stocks(family, reentrant):
    model = build(family, Size(layers=3))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_rungs_are_stocks(model, batch_for(model, Size(layers=3)), ["block"])


@pytest.mark.parametrize("has_lora", [False, True], ids=["full", "lora"])
def test_blocks_that_run_again_have_the_bits_of_stock_without_a_cache(has_lora):
    """GPT-2 with its own dropouts: attention is many functions, whose sums depend on how k and v lie in memory."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=64, bos_token_id=0, eos_token_id=0))
    if has_lora:
        lora = LoraConfig(target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
        model = get_peft_model(model, lora)
    batch, stock = tokens(4, 128), {}
    model.train()
    for model.config.use_cache in (True, False):
        stock[model.config.use_cache] = step(model, batch)
    assert any(not torch.equal(stock[True][name], tensor) for name, tensor in stock[False].items()), "no cache"
    patch(model, MemSaveConfig(checkpoint="block"))
    for model.config.use_cache in (True, False):
        assert_same(step(model, batch), stock[False])


def test_blocks_that_run_again_write_twice_to_what_they_write():
    counts = {}
    for name in ("stock", "gate", "block"):
        model, batch = llama()
        attention = next(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)).self_attn
        attention.register_buffer("count", torch.zeros(()))
        attention.register_forward_pre_hook(lambda module, _: (module.count.add_(1), None)[1])
        if name != "stock":
            patch(model, MemSaveConfig(checkpoint=name))
        step(model, batch)
        counts[name] = attention.count.item()
    assert counts == {"stock": 1, "gate": 1, "block": 2}


@pytest.mark.long
@pytest.mark.parametrize(
    "rungs", [(None, "qkv", "gate"), pytest.param(("o_proj", "up", "block"), marks=MATRIX)], ids=["half", "others"]
)
def test_nf4_linears_run_again_by_their_own_forward(rungs, tmp_path):
    pytest.importorskip("bitsandbytes")

    def make(layers):
        build("llama", replace(QUOTED, layers=layers), torch.bfloat16).save_pretrained(tmp_path / str(layers))
        return quantized(tmp_path / str(layers), 4)

    model = make(2)
    batch = batch_for(model, QUOTED)
    assert_rungs_are_stocks(model, batch, rungs)
    for rung, kept in zip(rungs, layer_by_rung(make, lambda model: batch, rungs), strict=True):
        assert NF4[rung] <= kept / QUOTED.u(4) <= 1.03 * NF4[rung], rung


def of_a_step(model, batch):
    """The peak; gradients are there already."""
    model(**batch).loss.backward()
    return count_peak(lambda: model(**batch).loss.backward()).peak


def for_peaks(family, has_lora, layers):
    """A model and its batch; products in bf16 may be slow."""
    size = Size(hidden=128, heads=4, layers=layers, batch=1 if has_lora else 8, seq=128)
    model = adapted(family, size=size) if has_lora else build(family, size)
    return model, batch_for(model, size), size.u(2 if has_lora else 4)


@pytest.mark.long
@on_cpu
@pytest.mark.parametrize(("family", "has_lora"), halved(["bert", "llama"], [False, True]))
def test_each_rung_lowers_the_peak_of_a_step(family, has_lora):
    model, batch, _ = for_peaks(family, has_lora, 12)

    def peak(rung, layers=None):
        patch(model, MemSaveConfig(checkpoint=rung, layers=layers), replace=True)
        return of_a_step(model, batch)

    peaks = [peak(rung) for rung in (None, *RUNGS)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.37 * peaks[0]
    assert peaks[-1] < peak("block", {"checkpoint": 6}) < 0.75 * peaks[0]


@pytest.mark.long
@on_cpu
@pytest.mark.parametrize(
    ("family", "has_lora", "how"),
    halved(["bert", "llama"], [False, True], ["checkpoint='block'", "non-reentrant", "reentrant"]),
)
def test_checkpointed_blocks_peak_at_their_inputs_and_one_block(family, has_lora, how):
    """L layers of which each keeps 1u, and the whole step of one layer at the floor; LoRA is PEFT's by default."""
    layers = 8

    def peak(number, is_checkpointed):
        model, batch, u = for_peaks(family, has_lora, number)
        patch(model, MemSaveConfig(checkpoint="block" if is_checkpointed and how.startswith("checkpoint") else None))
        if is_checkpointed and not how.startswith("checkpoint"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": how == "reentrant"})
            model.enable_input_require_grads()
        return of_a_step(model, batch) / u

    one, deepest = peak(1, False), peak(layers, True)
    assert (deepest - peak(layers // 2, True)) / (layers // 2) == pytest.approx(1, abs=0.01)
    workspace = 3.02  # 0 to 3: what runs again has its output, and in LLaMA's LoRA an fp32 copy, beside stock's
    assert deepest <= layers - 1 + one + workspace


def test_a_part_of_the_blocks_runs_again():
    model = build("llama", replace(QUOTED, layers=4))
    batch, kept = batch_for(model, QUOTED), []
    for layers in ({"checkpoint": 0}, {"checkpoint": 0.5}, {"checkpoint": 3}, {"checkpoint": 1.0}, None):
        patch(model, MemSaveConfig(checkpoint="gate", layers=layers), replace=True)
        kept.append(measure_kept(model, batch).total)
    assert [round((kept[0] - k) / QUOTED.u(4) / 8.5, 1) for k in kept] == [0, 2, 3, 4, 4]


def test_copies_and_pickles_keep_the_rung_and_undo_takes_it_back():
    model, batch = llama()
    stock = step(model, batch)
    names = [(type(m), set(vars(m))) for m in model.modules()]
    patch(model, MemSaveConfig(checkpoint="block"))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert measure_kept(again, batch).total == measure_kept(model, batch).total
        assert_same(step(again, batch), stock)
    unpatch(model)
    assert [(type(m), set(vars(m))) for m in model.modules()] == names
    assert_same(step(model, batch), stock)


def test_a_weight_written_to_before_backward_raises_as_in_stock():
    model, batch = llama()
    patch(model, GATE)
    loss = model(**batch).loss
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_adapters_and_sampled_linears_stand_beside_it():
    model, batch = llama()
    report = patch(model, MemSaveConfig(checkpoint="gate", linear=WTACRS(targets=("down_proj",), minimum=1)))
    assert {"run_again", "wta_crs"} <= {site.op for site in report.patched}
    model(**batch).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    report = patch(llama()[0], MemSaveConfig(checkpoint="qkv", linear=WTACRS(targets=("q_proj", "o_proj"))))
    assert {site.reason for site in report.skipped if site.op == "run_again"} == {"wta_crs replaces its forward"}


def test_errors_say_what_was_expected():
    with pytest.raises(ConfigError, match="checkpoint must be one of None, 'o_proj'"):
        MemSaveConfig(checkpoint="down")
    with pytest.raises(ConfigError, match=r"from 0\.0 to 1\.0, got 1\.5"):
        MemSaveConfig(checkpoint="up", layers={"checkpoint": 1.5})
    with pytest.raises(ConfigError, match="whole number of blocks"):
        MemSaveConfig(layers={"norm": 0.5})
    with pytest.raises(PatchError, match="expected linears of a known name"):
        patch(nn.Sequential(nn.Linear(2, 2)), MemSaveConfig(checkpoint="up"))


# Linears are known by their weights: whatever a tool does to model and weights, classes stay.


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_no_class_of_a_linear_changes(family):
    model = build(family, SIZE)
    before = {name: type(m) for name, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D")}
    for rung in RUNGS[:-1]:
        report = patch(model, MemSaveConfig(checkpoint=rung), replace=True)
        assert {site.op for site in report.patched} == {"model", "block", "run_again"}
        assert {name: type(m) for name, m in model.named_modules() if name in before} == before
    if family == "bert":  # tools that ask for the class find every linear
        linears = sum(type(m) is nn.Linear for m in model.modules())
        converted = quantize_dynamic(model.eval(), {nn.Linear})
        assert sum(type(m) is torch.ao.nn.quantized.dynamic.Linear for m in converted.modules()) == linears > 10


def _assigned(model):
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    return model


def _plain_attributes(model):
    """As FSDP1 and replicas of DataParallel have them."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__dict__["weight"] = module._parameters.pop("weight")
    return model


CHANGES = {
    "nothing": lambda model: model,
    "a copy": copy.deepcopy,
    "a pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "weights assigned": _assigned,
    "weights moved": lambda model: model.double().float(),
    "weights that are no parameters": _plain_attributes,
    "patched again": lambda model: (patch(model, GATE), model)[1],
}


def test_what_is_kept_stays_what_it_was():
    kept = {}
    for name, config in (("floor", True), *dict.fromkeys(CHANGES, GATE).items()):
        model, batch = llama()
        patch(model, config)
        kept[name] = measure_kept(CHANGES.get(name, CHANGES["nothing"])(model), batch).total
    assert kept["nothing"] < 0.6 * kept["floor"]
    assert {name: kept[name] for name in CHANGES} == dict.fromkeys(CHANGES, kept["nothing"])


def test_adapters_added_later_are_around_linears_that_run_again():
    kept, steps = [], []
    for config in (None, True, GATE):
        model, batch = llama()
        if config is not None:
            patch(model, config)
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "gate_proj"], lora_dropout=0.1))
        kept.append(measure_kept(model, batch).total)
        steps.append(step(model, batch))
    assert_same(steps[2], steps[0])
    assert kept[2] < 0.7 * kept[1]


def test_a_hook_on_the_linear_is_not_run_again():
    (model, batch), calls = llama(), []
    linear = model.model.layers[0].mlp.gate_proj
    linear.register_forward_hook(lambda module, args, y: calls.append(1) or 2 * y)
    stock = step(model, batch)
    patch(model, GATE)
    assert_same(step(model, batch), stock)
    assert len(calls) == 2


def test_what_cannot_run_again_is_named_with_its_class():
    class Own(nn.Linear):
        def forward(self, x):
            return x @ self.weight.t()

    model, _ = llama()
    for layer in model.model.layers:
        for parent, names in ((layer.self_attn, ("q_proj", "k_proj", "v_proj", "o_proj")), (layer.mlp, ("up_proj",))):
            for name in names:
                getattr(parent, name).__class__ = Own
    with pytest.raises(PatchError, match=r"layers\.0\.self_attn\.q_proj \(Own\): its forward is its own.*'block'"):
        patch(model, MemSaveConfig(checkpoint="up"))
    report = patch(model, GATE)
    assert {site.cls: site.status for site in report.sites if site.op == "run_again"} == {
        "Own": "skipped", "Linear": "patched",
    }  # fmt: skip
