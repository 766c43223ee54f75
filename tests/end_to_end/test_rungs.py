"""Rungs below the floor: what a layer keeps, what it costs, no bit of a step changes, and no class of a linear."""

import copy
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.ao.quantization import quantize_dynamic
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import modeling_utils
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave import WTACRS, MemSaveConfig, measure_kept, patch, unpatch
from hf_memsave.arch.versions import enable_checkpointing
from hf_memsave.count.peak import count_peak
from hf_memsave.errors import PatchError
from support.helpers import MATRIX, of_layers, thinned
from support.lora import adapted, quantized
from support.steps import assert_same, step
from support.zoo import FAMILIES, LOW, MODES, MORE, QUOTED, Size, batch_for, build, llama_8b

RUNGS = ("o_proj", "qkv", "up", "gate", "block")
SIZE, DEEPER = Size(), Size(layers=3)
GATE = MemSaveConfig(checkpoint="gate")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="figures are those of CPU kernels")

#: What a layer keeps at the floor, and by each rung, in u. BERT's (and GPT-2's) MLP has one input of an activation,
#: which "up" and "gate" both free. LLaMA-3-8B's proportions are in bf16. On NF4, in u of fp32: x or a bf16 product, h
#: likewise, o; q, k, v, gate and up are in bf16.
U = {
    "bert": (10, 9, 6, 2, 2, 1), "gpt2": (10, 9, 6, 2, 2, 1), "llama": (10.5, 9.5, 7.5, 4.75, 2, 1),
    "phi": (9, 9, 6, 2, 2, 1), "phi3": (10.5, 9.5, 7.5, 7.5, 2, 1), "llama 8b": (11.5, 10.5, 9, 5.5, 2, 1),
    "llama nf4": (6.25, 6, 5, 3.625, 2.25, 1),
}  # fmt: skip
H = 512


def tokens(*shape):
    ids = torch.randint(0, 64, shape)
    return {"input_ids": ids, "labels": ids}


def llama(config=None):
    model = build("llama", SIZE)
    if config is not None:
        patch(model, config)
    return model, batch_for(model, SIZE)


def at(model, rung, layers=None, **fields):
    patch(model, MemSaveConfig(checkpoint=rung, layers=layers, **fields), replace=True)
    return model


def assert_a_layer_keeps(make, batch, u, expected, more=0.0, dropout="auto"):
    """By each rung, the difference of two depths."""
    two, four = (
        {rung: of_layers(measure_kept(at(model, rung, dropout=dropout), batch)) for rung in expected}
        for model in map(make, (2, 4))
    )
    for rung, of_rung in expected.items():
        assert of_rung <= (four[rung] - two[rung]) / 2 / u <= 1.03 * of_rung + more, rung


@on_cpu
@pytest.mark.parametrize("family", [family for family in U if family != "llama nf4"])
def test_a_layer_keeps_its_rung(family):
    expected = dict(zip((None, *RUNGS), U[family], strict=True))
    if family == "llama 8b":
        assert_a_layer_keeps(partial(llama_8b, hidden=H), tokens(2, 128), 256 * H * 2, expected)
    else:
        batch, statistics = batch_for(build(family, QUOTED), QUOTED), 0.05  # of attention's rows, and dropout's states

        def make(layers):
            return build(family, replace(QUOTED, layers=layers))

        assert_a_layer_keeps(make, batch, QUOTED.u(4), expected, statistics)


@on_cpu
def test_a_rung_costs_its_products_and_no_more_and_the_last_one_attention_too():
    model, batch, length, flops, attentions = llama_8b(2, H), tokens(1, 16), 16, [], []

    def count():
        with FlopCounterMode(display=False) as counter:
            model(**batch).loss.backward()
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            model(**batch).loss.backward()
        every = counter.get_flop_counts()["Global"].items()
        flops.append(sum(n for op, n in every if "attention" not in str(op)))  # which PyTorch 2.15 counts on CPU too
        attentions.append(sum(e.name == "aten::_scaled_dot_product_flash_attention_for_cpu" for e in trace.events()))

    count()
    for rung in (None, *RUNGS):
        at(model, rung)
        count()
    products = [(of_rung - flops[0]) / 2 / (2 * length * H * H) for of_rung in flops]
    assert products == [0, 0, 1, 2.5, 6, 9.5, 9.5]  # o; q, k and v; up; gate
    assert attentions == [2, 2, 2, 2, 2, 2, 4]


def assert_rungs_are_stocks(model, batch, rungs=RUNGS, mode="fp32"):
    stock = step(model, batch, low=LOW[mode])
    for rung in rungs:
        at(model, rung)
        for _ in range(2):
            assert_same(step(model, batch, low=LOW[mode]), stock)


@pytest.mark.parametrize("third", [0, *(pytest.param(third, marks=MATRIX) for third in (1, 2))])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES + MORE)
def test_a_step_is_stocks_to_the_bit(family, mode, third):
    """Of families x modes x rungs every third combination, which is every pair."""
    start = ((FAMILIES + MORE).index(family) + list(MODES).index(mode) + third) % 3
    model = build(family, DEEPER, MODES[mode])
    assert_rungs_are_stocks(model, batch_for(model, DEEPER, padded=True), RUNGS[start::3], mode)


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


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("how", [{}, {"every_n_layers": 2}, {"offload": True}, {"use_reentrant": True}], ids=str)
def test_under_checkpointing_a_step_is_stocks(family, how, monkeypatch):
    """Of every block, of every second one, with its inputs in the host's memory, and by the older way."""
    if not torch.cuda.is_available():  # where nothing can be pinned
        monkeypatch.setattr(modeling_utils, "save_on_cpu", lambda **_: torch.autograd.graph.save_on_cpu())
    model = build(family, DEEPER)
    model.enable_input_require_grads()
    if "use_reentrant" in how:
        enable_checkpointing(model, **how)
    else:
        model.activation_checkpointing_enable(**how)
    assert_rungs_are_stocks(model, batch_for(model, DEEPER), ["block"])


@pytest.mark.parametrize("has_lora", [False, True], ids=["full", "lora"])
def test_blocks_that_run_again_have_the_bits_of_stock_without_a_cache(has_lora):
    """GPT-2 with its own dropouts: attention is many functions, whose sums depend on how k and v lie in memory.

    On some processors; on others stock has the same bits with a cache, and this tells less.
    """
    model = build("gpt2", DEEPER, vocab_size=64, attn_pdrop=0.1)
    if has_lora:
        lora = LoraConfig(target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
        model = get_peft_model(model, lora)
    batch, found = tokens(4, 128), {}
    for is_patched in (False, True):
        for model.config.use_cache in (True, False):
            found[is_patched, model.config.use_cache] = step(at(model, "block") if is_patched else model, batch)
    assert_same(found[True, True], found[False, False])
    assert_same(found[True, False], found[False, False])


def test_blocks_that_run_again_write_twice_to_what_they_write():
    counts = {}
    for name in ("stock", "gate", "block"):
        model, batch = llama()
        attention = next(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)).self_attn
        attention.register_buffer("count", torch.zeros(()))
        attention.register_forward_pre_hook(lambda module, _: (module.count.add_(1), None)[1])
        step(model if name == "stock" else at(model, name), batch)
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
    batch, expected = batch_for(model, QUOTED), dict(zip((None, *RUNGS), U["llama nf4"], strict=True))
    assert_rungs_are_stocks(model, batch, rungs)
    assert_a_layer_keeps(make, batch, QUOTED.u(4), {rung: expected[rung] for rung in rungs}, dropout="seed")  # no bits
    model.set_attn_implementation("eager")
    floor, qkv = (measure_kept(at(model, rung), batch).total for rung in (None, "qkv"))
    assert floor - qkv > 0.99 * 2 * (expected[None] - expected["qkv"]) * QUOTED.u(4)


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
@pytest.mark.parametrize(("family", "has_lora"), thinned(4, ["llama", "bert"], [True, False]))
def test_each_rung_lowers_the_peak_of_a_step(family, has_lora):
    model, batch, _ = for_peaks(family, has_lora, 12)
    peaks = [of_a_step(at(model, rung), batch) for rung in (None, *RUNGS)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.37 * peaks[0]
    assert peaks[-1] < of_a_step(at(model, "block", {"checkpoint": 6}), batch) < 0.75 * peaks[0]


@pytest.mark.long
@on_cpu
@pytest.mark.parametrize(
    ("family", "has_lora", "how"),
    thinned(3, ["bert", "llama"], [False, True], ["checkpoint='block'", "non-reentrant", "reentrant"]),
)
def test_checkpointed_blocks_peak_at_their_inputs_and_one_block(family, has_lora, how):
    """L layers of which each keeps 1u, and the whole step of one layer at the floor; LoRA is PEFT's by default."""
    layers, is_ours = 8, how.startswith("checkpoint")

    def peak(number, is_checkpointed):
        model, batch, u = for_peaks(family, has_lora, number)
        at(model, "block" if is_checkpointed and is_ours else None)
        if is_checkpointed and not is_ours:
            enable_checkpointing(model, use_reentrant=how == "reentrant")
            model.enable_input_require_grads()
        return of_a_step(model, batch) / u

    one, deepest = peak(1, False), peak(layers, True)
    assert (deepest - peak(layers // 2, True)) / (layers // 2) == pytest.approx(1, abs=0.01)
    # 0 to 3: what runs again has its output, and in LLaMA's LoRA an fp32 copy, beside stock's; and masks' bits, which
    # the counter sees, as it does not see a generator's state.
    workspace = 3.1
    assert deepest <= layers - 1 + one + workspace


# What it stands beside, and how it is known: by weights, so that whatever a tool does to the model, classes stay.


def test_a_part_of_the_blocks_runs_again():
    model = build("llama", replace(QUOTED, layers=4))
    batch, kept = batch_for(model, QUOTED), []
    for layers in ({"checkpoint": 0}, {"checkpoint": 0.5}, {"checkpoint": 3}, {"checkpoint": 1.0}, None):
        kept.append(measure_kept(at(model, "gate", layers), batch).total)
    assert [round((kept[0] - k) / QUOTED.u(4) / 8.5, 1) for k in kept] == [0, 2, 3, 4, 4]


@pytest.mark.parametrize("config", [GATE, MemSaveConfig(offload=True)], ids=["gate", "offload"])
def test_a_weight_written_to_before_backward_raises_as_in_stock(config):
    model, batch = llama(config)
    loss = model(**batch).loss
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_sampled_linears_stand_beside_it():
    model, batch = llama()
    report = patch(model, MemSaveConfig(checkpoint="gate", linear=WTACRS(targets=("down_proj",), minimum=1)))
    assert {"run_again", "wta_crs"} <= {site.op for site in report.patched}
    assert len(step(model, batch)) == 1 + len([*model.parameters()])
    sampled = MemSaveConfig(checkpoint="qkv", linear=WTACRS(targets=("q_proj", "o_proj")))
    skipped = patch(model, sampled, replace=True).skipped
    assert {site.reason for site in skipped if site.op == "run_again"} == {"wta_crs replaces its forward"}


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_no_class_of_a_linear_changes_and_undo_leaves_nothing(family):
    model = build(family, SIZE)
    names = [(type(m), set(vars(m))) for m in model.modules()]
    before = {name: type(m) for name, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D")}
    for rung in RUNGS:
        report = patch(model, MemSaveConfig(checkpoint=rung), replace=True)
        assert rung == "block" or {site.op for site in report.patched} == {"model", "block", "run_again"}
        assert {name: type(m) for name, m in model.named_modules() if name in before} == before
    unpatch(model)
    assert [(type(m), set(vars(m))) for m in model.modules()] == names
    if family == "bert":  # tools that ask for the class find every linear
        patch(model, GATE)
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
    "a copy": copy.deepcopy, "a pickle": lambda model: pickle.loads(pickle.dumps(model)), "weights assigned": _assigned,
    "weights moved": lambda model: model.double().float(), "weights that are no parameters": _plain_attributes,
}  # fmt: skip


@pytest.mark.parametrize("rung", ["gate", "block"])
def test_what_is_kept_and_computed_stays_what_it_was(rung):
    model, batch = llama(True)
    floor, stock = measure_kept(model, batch).total, step(model, batch)
    kept = measure_kept(at(model, rung), batch).total
    assert kept < 0.6 * floor
    for name, change in (*CHANGES.items(), ("patched again", lambda model: at(model, rung))):
        changed = change(copy.deepcopy(model))
        assert measure_kept(changed, batch).total == kept, name
        if name != "weights that are no parameters":
            assert_same(step(changed, batch), stock)


def test_adapters_added_later_are_around_linears_that_run_again():
    kept, steps = [], []
    for config in (None, True, GATE):
        model, batch = llama(config)
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
    assert_same(step(at(model, "gate"), batch), stock)
    assert len(calls) == 2


def test_what_cannot_run_again_is_named_with_its_class():
    class Own(nn.Linear):
        def forward(self, x):
            return x @ self.weight.t()

    model, _ = llama()
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "k_proj", "v_proj", "o_proj", "up_proj")):
            module.__class__ = Own
    with pytest.raises(PatchError, match=r"layers\.0\.self_attn\.q_proj \(Own\): its forward is its own.*'block'"):
        at(model, "up")
    sites = {site.cls: site.status for site in patch(model, GATE).sites if site.op == "run_again"}
    assert sites == {"Own": "skipped", "Linear": "patched"}
    with pytest.raises(PatchError, match="expected repeated blocks in Sequential, .* with linears of known names"):
        at(nn.Sequential(nn.Linear(2, 2)), "up")
