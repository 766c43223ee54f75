"""What a run can be besides a model and a batch, bad input, and what an estimate tells people: each peak, what fits."""

import contextlib
import json
import re
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
import yaml
from peft import LoraConfig
from transformers import MambaConfig

from hf_memsave import MemSaveConfig, estimate, plan
from hf_memsave.cli import main
from hf_memsave.config import names
from hf_memsave.config.config import RUNGS
from hf_memsave.config.sizes import gib
from hf_memsave.errors import MeasureError, MemSaveError
from hf_memsave.measure import largest as module
from hf_memsave.measure import models
from hf_memsave.measure.largest import largest
from hf_memsave.measure.lora import Lora
from hf_memsave.measure.models import count_parameters, depth_of, has_weights, load_config, most_tokens
from hf_memsave.measure.training import Training, build, prepared, trace_at, training_of
from support.helpers import MATRIX, on_stand_in
from support.zoo import Size, config_of

pytestmark = on_stand_in

CONFIG = config_of("llama", Size(hidden=128, layers=4), num_key_value_heads=4, vocab_size=4096)
BATCH, TOKENS = 2, 64
DEPTH = {"num_hidden_layers": 3}
SIZE, HEADS = Size(hidden=128, layers=3), {"num_key_value_heads": 4}
LLAMA = config_of("llama", SIZE, **HEADS)
STEP = dict(batch_size=1, seq_len=16)


def training(**fields):
    return Training(batch_size=BATCH, seq_len=TOKENS, **fields)


def peak(on_cpu=False, **fields):
    return trace_at(CONFIG, DEPTH, training(**fields), None, on_cpu=on_cpu).peak


@pytest.mark.parametrize("tokens", [1, 8])
def test_a_padded_step_on_a_real_device_has_a_mask(tokens, monkeypatch):
    """Transformers leaves out a mask of ones alone, so that a check would run another step than was estimated."""
    stock, masks = F.scaled_dot_product_attention, []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, attn_mask=None, **options: masks.append(
        attn_mask) or stock(*args, attn_mask=attn_mask, **options))  # fmt: skip
    config = config_of("bert", Size(layers=1))
    step = Training(batch_size=2, seq_len=tokens, dtype=torch.float32, padded=True)
    with prepared(config, step, None, "cpu") as (_, batch, forward, _):
        assert forward(**batch).loss.isfinite()
    assert len(masks) == 1 and (masks[0] is None) == (tokens == 1)


@pytest.mark.parametrize("lora", ["r=8", LoraConfig(r=8)], ids=str)
def test_adapters_given_otherwise_are_refused_with_the_form(lora):
    for call in (estimate, partial(plan, budget="1GiB")):
        with pytest.raises(MeasureError, match=r"lora: expected None or fields, such as {'r': 16}, got .*Change lora"):
            call(LLAMA, batch_size=1, seq_len=8, lora=lora)


#: Known model -> its published number of parameters.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616, "llama-3-8b": 8_030_261_248, "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496, "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.3": 7_248_023_552, "mixtral-8x7b-v0.1": 46_702_792_704, "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512, "qwen3-0.6b": 596_049_920, "qwen3-8b": 8_190_735_360,
    "phi-3-mini-4k-instruct": 3_821_079_552, "gemma-2-9b": 9_241_705_984, "bert-base-uncased": 109_514_298,
    "bert-large-uncased": 335_174_458, "roberta-large": 355_412_057, "gpt2-xl": 1_557_611_200,
    "t5-large": 737_668_096, "vit-base-patch16-224": 86_567_656, "vit-large-patch16-224": 304_326_632,
}  # fmt: skip


def test_known_models_have_the_published_number_of_parameters_and_are_no_model_types():
    assert {name: count_parameters(load_config(name)) for name in PUBLISHED} == PUBLISHED
    known = yaml.safe_load((Path(names.__file__).parents[1] / names.SHAPES).read_text())
    assert known.keys() == PUBLISHED.keys() and not known.keys() & transformers.CONFIG_MAPPING.keys()


@pytest.mark.parametrize("hub", ["gated", "silent", "open"])
def test_a_known_model_is_the_hubs_where_that_gives_it_else_of_the_sizes_known(hub, monkeypatch, capsys):
    def give(name, **options):
        assert hub == "open" or options["local_files_only"] == (hub == "silent")
        return MambaConfig(name_or_path=name) if hub == "open" else open("/nowhere")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", give)
    for home in (names, models):
        monkeypatch.setattr(home, "hub_answers", lambda: hub != "silent")
    for name in ("meta-llama/Meta-Llama-3-8B", "a/Llama-3-8B-hf"):
        config = load_config(name)
        assert (config.model_type == "mamba") == has_weights(name, config) == (hub == "open")
        assert hub == "open" or config.to_dict() == load_config("LLAMA-3-8b").to_dict()
    if hub != "open":
        assert main(["estimate", name, "--layers", "1", "--seq-len", "8", "--lora", "r=8"]) == 0
        assert capsys.readouterr().out.startswith(f"{name}: sizes known to hf_memsave, without the hub.\n")
    with pytest.raises(MeasureError, match="nowhere|got neither") if hub != "open" else contextlib.nullcontext():
        load_config("meta-llama/Llama-3-9B")


#: Of adapters, of the weights, and whether these are in 4 bits -> what adapters have.
DTYPES = {
    ("fp32", torch.bfloat16, None): torch.float32, ("model", torch.bfloat16, None): torch.bfloat16,
    ("model", torch.float32, None): torch.float32, ("model", torch.bfloat16, "nf4"): torch.float32,
}  # fmt: skip


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(("dtype", "base", "quantized"), DTYPES)
def test_adapters_have_the_dtype_that_was_asked_for(device, dtype, base, quantized):
    with torch.device(device):
        model = build(CONFIG, training(lora=Lora(dtype=dtype), dtype=base, quantized=quantized))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {DTYPES[dtype, base, quantized]}


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_what_a_class_keeps_in_fp32_is_not_in_4_bits(device):
    config = config_of("t5-encoder", Size(layers=1))
    with torch.device(device):
        model = build(config, training(lora=Lora(targets="q+v"), quantized="nf4"))
    mlp = model.encoder.block[0].layer[1].DenseReluDense
    assert type(mlp.wo) is torch.nn.Linear
    assert mlp.wo.weight.dtype == torch.float32
    assert mlp.wi.weight.dtype == torch.uint8


@pytest.mark.long
def test_linears_in_4_bits_run_again_as_those_of_bitsandbytes_do():
    settings, of = [MemSaveConfig(), MemSaveConfig(checkpoint="gate")], training(lora=Lora(), quantized="nf4")
    here, there = ([trace_at(CONFIG, DEPTH, of, one, on_cpu=there).kept for one in settings] for there in (False, True))
    assert here[0] - here[1] == pytest.approx(there[0] - there[1], rel=0.01)
    assert here[1] < 0.8 * here[0]


@pytest.mark.long
def test_adapters_of_16_bits_keep_no_input_in_32():
    loras = [Lora(dtype=dtype, targets="q_proj+v_proj") for dtype in ("model", "fp32")]
    plain, wide = (trace_at(CONFIG, DEPTH, training(lora=lora), None).by_kind for lora in loras)
    one = 3 * BATCH * TOKENS * 128  # elements in three layers: the inputs of q's and v's adapters in fp32, and v
    assert wide["cast"] - plain.get("cast", 0) == pytest.approx(2 * one * 4 + one * 2, rel=0.01)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_an_output_that_is_held_is_alive_in_backward(autocast):
    peaks = [[peak(on_cpu, holds_output=h, autocast=autocast) for h in (False, True)] for on_cpu in (False, True)]
    more, more_on_cpu = (held - plain for plain, held in peaks)
    logits = BATCH * TOKENS * 4096 * 2
    assert logits <= more <= logits + 4096
    assert more_on_cpu == pytest.approx(more, rel=0.02)


BART = config_of("bart-encoder", Size(hidden=64, seq=2**16))
#: Every setting: what is patched.
SETTINGS = {"stock": None, "stock, checkpointing": None, "exact": MemSaveConfig()}
SETTINGS |= {rung: MemSaveConfig(checkpoint=rung) for rung in RUNGS}
SETTINGS |= {"offload": MemSaveConfig(offload=True), "max": MemSaveConfig.preset("max")}


@pytest.mark.long
@pytest.mark.parametrize(("config", "setting"), [*((CONFIG, name) for name in SETTINGS), (BART, "exact")])
def test_activations_grow_with_the_tokens_and_not_with_their_square(config, setting):
    """As on a GPU, where whole sequences need no S x S mask, nor do the masks of ones that BART's decoder makes."""
    of = Training(batch_size=1, seq_len=2**15, checkpointing="checkpointing" in setting)
    both = of, replace(of, seq_len=2**16)
    traces = [trace_at(config, depth_of(config, 2), one, SETTINGS[setting]) for one in both]
    activations = [t.peak - t.parameters - t.trained - t.states for t in traces]
    least = 1.5 if setting == "tiles" else 1.9  # the work on a tile does not grow
    assert least * activations[0] < activations[1] <= 2.1 * activations[0]


@pytest.mark.long
@pytest.mark.parametrize("quantized", [None, "nf4"])
def test_adapters_are_checkpointed_under_autocast(quantized):
    of = dict(lora=Lora(), quantized=quantized, autocast=torch.bfloat16)
    assert peak(**of, checkpointing=True) < peak(**of)


def test_a_batch_of_any_size_takes_no_memory_here_and_dtypes_may_be_names():
    named = [training_of(batch_size=1, seq_len=1, dtype=a, autocast=b)
             for a, b in (("float32", "bfloat16"), ("fp32", "bf16"), (torch.float32, torch.bfloat16))]  # fmt: skip
    assert named[0] == named[1] == named[2]
    result = estimate(CONFIG, batch_size=10**7, seq_len=TOKENS, memsave=False, memory=2**40, layers=3)
    assert result.fits is False
    assert result.stock.peak > 10**7 * TOKENS * 4096 * 4
    with pytest.raises(MeasureError, match="a batch of 1000000000000000000: .* Lower batch_size"):
        estimate(CONFIG, batch_size=10**18, seq_len=TOKENS, memsave=False)


BAD = [
    ("nosuch/config.json", {}, "no such file or folder"),
    (3, {}, "expected a configuration or a model of Transformers"),
    ("bert", {"batch_size": 0}, "batch_size: expected a whole number from 1, got 0"),
    ("bert", {"seq_len": 0.5}, "seq_len: expected a whole number from 1, got 0.5"),
    ("bert", {"batchsize": 1}, "a step: expected fields .*got batchsize"),
    ("bert", {"optimizer": "adam"}, "optimizer: expected adamw or"),
    ("bert", {"attention": "fast"}, "attention: expected flash or"),
    ("bert", {"dtype": torch.int8}, "dtype: expected torch.float32"),
    ("bert", {"quantized": "nf4"}, "lora: expected adapters"), ("bert", {"memsave": "magic"}, "unknown preset 'magic'"),
    (CONFIG, {"sharding": "zero9", "devices": 2, "memsave": False}, "sharding: expected ddp or"),
    ("bert", {"lora": Lora(targets="nothing")}, "LoRA: "), (CONFIG, {"memory": 1.5}, "memory: expected bytes"),
    (CONFIG, {"memory": "24"}, "memory: expected bytes, or a text such as '16GiB'"),
    (CONFIG, {"layers": 0}, "layers: expected a whole number from 1, or None, got 0"),
    (CONFIG, {"layers": True}, "layers: expected a whole number from 1, or None, got True"),
    (CONFIG, {"lora": {"dtype": "fp23"}}, "lora: expected .*dtype fp32 or model, got .*fp23"),
    (CONFIG, {"lora": {"r": 0}}, "lora: expected r from 1, .*got r 0"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "asked", "message"), BAD, ids=lambda value: str(value)[:24])
def test_bad_input_is_told(model, asked, message):
    with pytest.raises(MemSaveError, match=message):
        estimate(model, **{"batch_size": 1, "seq_len": 8, **asked})


@pytest.mark.long
def test_models_whose_blocks_are_not_known_and_those_without_sdpa_are_estimated(monkeypatch):
    mamba = MambaConfig(hidden_size=32, state_size=4, vocab_size=64, num_hidden_layers=4)
    assert estimate(mamba, batch_size=1, seq_len=8, memsave=False).stock.kept > 0
    monkeypatch.setattr("hf_memsave.measure.trace.GradientCheckpointingLayer", type(None))
    monkeypatch.setattr("hf_memsave.measure.depth._KNOWN", {})
    assert estimate(CONFIG, batch_size=1, seq_len=8, memsave=False).stock.kept > 0


@pytest.mark.filterwarnings("error:.*checkpointing.* is deprecated:FutureWarning")
def test_checkpointing_is_asked_for_by_its_new_name():
    build(CONFIG, training(checkpointing=True))
    with pytest.raises(FutureWarning):  # so that this test can fail
        warnings.warn("`gradient_checkpointing_enable` is deprecated", FutureWarning, stacklevel=1)


@pytest.mark.long
def test_a_small_models_figures_are_in_mib_and_the_optimizers_step_is_told_apart():
    """All parameters are trained on few tokens: the peak is in the optimizer's step."""
    full = estimate(LLAMA, **STEP, memory="505MiB")
    for memory in (full.stock, full.patched):
        assert memory.peak == max(memory.in_passes, memory.in_optimizer) == memory.in_optimizer
        assert memory.in_optimizer == pytest.approx(memory.fixed + memory.temporaries, rel=0.001)
        assert memory.temporaries == pytest.approx(memory.trained, rel=0.02)  # foreach takes them once more
    text = str(full)
    rows = dict(re.findall(r"^ *(\S.*?)  +([\d.,]+ \w+)", text, re.MULTILINE))
    assert set(rows) >= {"gradients", "kept for backward", "peak of the optimizer's step", "peak of the step"}
    assert all(re.fullmatch(r"[1-9][\d.,]* [KM]iB", cell) for cell in rows.values())
    assert "stock and patched: the peak is in the optimizer's step, in _foreach_" in text
    assert "Lower it with fused AdamW (Trainer: optim='adamw_torch_fused') or foreach=False" in text
    parts = [gib(getattr(full.patched, name)) for name in ("fixed", "parameters", "trained", "states")]
    fixed = "Fixed at any batch: {} (parameters {}, gradients {}, states {}).".format(*parts)
    assert f"Does not fit in 505.00 MiB (529.5 MB): {gib(full.patched.needed - full.memory)}" in text
    assert fixed in text
    assert re.fullmatch(r"<Estimate of llama, 3 layers, .*: stock .*, patched .*, does not fit in .*>", repr(full))


@pytest.mark.long
def test_two_peaks_name_their_columns_and_one_that_is_elsewhere_asks_for_no_other_optimizer():
    wide = config_of("llama", SIZE, **HEADS, vocab_size=20_000)  # so that logits are in chunks
    text = str(estimate(wide, batch_size=16, seq_len=128))
    assert re.search(r"^stock: the peak is in the backward, in \w+\.\npatched: the peak is in the", text, re.MULTILINE)
    assert "Lower it" not in text and "it in" not in text


@pytest.mark.long
def test_a_plan_shows_stock_and_the_cheapest_of_each_rung():
    step = dict(batch_size=16, seq_len=128, optimizer="sgd")
    floor = plan(LLAMA, budget=estimate(LLAMA, **step).patched.needed, **step)
    assert re.fullmatch(r"<BudgetPlan for [\d.]+ MiB: no product runs again, [\d.]+ MiB, 0.0% more work>", repr(floor))
    assert [one.config.checkpoint for one in floor.fitting] == [None, "gate", "block"]
    least = floor.tried[-1].needed
    found = plan(LLAMA, budget=(least + floor.best.needed) // 2, **step)
    assert found.fitting[0] == found.best and {"gate", "block"} <= {one.config.checkpoint for one in found.fitting}
    order = [(one.config.offload, one.cost) for one in found.fitting]
    assert order == sorted(order)
    text = str(found)
    assert re.search(r"^stock +\S+ MiB +0.0% .* too much$", text, re.MULTILINE)
    assert re.search(r"^stock, gradient checkpointing +\S+ MiB +[\d.]+% +", text, re.MULTILINE)
    stock = estimate(LLAMA, **step, memsave=False).stock.needed
    checkpointed = estimate(LLAMA, **step, memsave=False, checkpointing=True).stock.needed
    assert [needed for needed, _ in found.stock.values()] == [stock, checkpointed]


@pytest.mark.long
def test_the_command_says_what_makes_a_step_fit_and_each_of_it_does(tmp_path, capsys):
    LLAMA.save_pretrained(tmp_path)
    command = ["estimate", str(tmp_path), "--seq-len", "16", "--batch-size", "1", "--memory", "569MiB"]
    assert main([*command, "--json", str(tmp_path / "a.json")]) == 1
    told = capsys.readouterr().out
    assert "patched: no batch fits, not even of 8 tokens." in told and "is 0" not in told
    changes = json.loads((tmp_path / "a.json").read_text())["what_fits"]
    assert f"Each of these alone makes it fit, patched: {'; '.join(changes)}." in told
    limit = dict(memory="569MiB", **STEP)
    ways = {"fused AdamW": dict(optimizer="adamw_fused"), "LoRA (r=8)": dict(lora={"r": 8})}
    for words, fields in ways.items():
        result = estimate(LLAMA, **limit, **fields)
        told = [change for change in changes if change.startswith(words)]
        assert result.fits == bool(told), words
        assert not told or f"({result.patched.needed / 2**20:,.2f} MiB)" in told[0]
    assert {"8-bit AdamW", "LoRA (r=8)"} <= {change.rpartition(" (")[0] for change in changes}


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param("batch_size", marks=MATRIX), "seq_len"])
def test_the_largest_is_found_by_few_traces_and_one_more_does_not_fit(name, monkeypatch):
    search, asked = module.search, []
    monkeypatch.setattr(module, "search", lambda needed, *rest: search(lambda n: asked.append(n) or needed(n), *rest))
    step, limit = dict(batch_size=16, seq_len=64, optimizer="sgd"), 700 * 2**20
    of = Training(**step)
    found = largest(LLAMA, depth_of(LLAMA), of, MemSaveConfig(), name, limit, ("ddp", 1))
    step_of = 8 if name == "seq_len" else 1
    needed = [estimate(LLAMA, **step | {name: number}).patched.needed for number in (found, found + step_of)]
    assert needed[0] <= limit < needed[1]
    assert len(asked) <= 7 and {found // step_of, found // step_of + 1} <= set(asked)


@pytest.mark.long
def test_the_longest_sequence_is_one_that_the_model_has_positions_for():
    """RoBERTa has two rows more, for no token."""

    def longest(config, limit, **fields):
        of = Training(batch_size=1, **fields)
        return largest(config, depth_of(config), of, MemSaveConfig(), "seq_len", limit, ("ddp", 1))

    size, fields = replace(SIZE, layers=4), {"max_position_embeddings": 66}
    config = config_of("roberta", size, **fields)
    assert most_tokens(config) == longest(config, 2**36, seq_len=16) == 64
    short = config_of("llama", size, **HEADS, **fields)  # which has no table of them
    assert longest(short, 600 * 2**20, seq_len=128, optimizer="sgd") > 128
