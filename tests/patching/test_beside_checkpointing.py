"""Beside gradient checkpointing of some layers, offloaded or selective: stock's bits, and figures that are counted."""

import functools
from dataclasses import replace

import pytest
import torch
import trl.models
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import modeling_utils

from hf_memsave import MemSaveConfig, measure_kept, patch
from hf_memsave.config.sizes import gib
from support.helpers import CopiesAsOnCuda, of_layers, on_cpu_alone
from support.in_rows import assert_near
from support.pairs import pairwise
from support.steps import assert_same, step
from support.zoo import Size, batch_for, build

on_cpu = on_cpu_alone("this count of bytes")
SIZE = Size(hidden=64, heads=4, layers=3, batch=2, seq=128)
SDPA = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
#: Keeps what products and attention give.
PRODUCTS = functools.partial(
    create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, SDPA]
)
CONFIGS = {"exact": {}, "gate": {"checkpoint": "gate"}, "block": {"checkpoint": "block"}, "tiles": {"tiles": 40}}
HOW = {
    "every second": {"every_n_layers": 2}, "offload": {"offload": True}, "both": {"every_n_layers": 2, "offload": True},
    "TRL": {}, "TRL, every second": {"every_n_layers": 2}, "products": {},
}  # fmt: skip


def make(family, size=SIZE, **options):
    model = build(family.removesuffix(", LoRA"), size, **options)
    if family.endswith("LoRA"):
        torch.manual_seed(0)
        options = LoraConfig(r=2, lora_dropout=0.05, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, options).train()
    return model


def checkpointed(model, how):
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if how.startswith("TRL"):
        trl.models.enable_selective_activation_checkpointing(base)
    options = {"use_reentrant": False} | ({"context_fn": PRODUCTS} if how == "products" else {})
    base.activation_checkpointing_enable(options, **HOW[how])
    return model


def compare(stock, ours, config, are_same=True):
    """Two steps of each; the first step's count, and what it leaves out of what an independent count finds."""
    batch = batch_for(stock, SIZE)
    expected, by_stock = step(stock, batch), measure_kept(stock, batch).total
    report = patch(ours, MemSaveConfig(**config))
    for _ in range(2):
        (assert_same if are_same else functools.partial(assert_near, slack=3e-6, least=1e-3))(
            step(ours, batch), expected
        )
    kept, found = measure_kept(ours, batch).total, report.step
    assert found.nbytes_stock + found.nbytes_moved == pytest.approx(by_stock, rel=0.01)
    if are_same or not hasattr(ours, "peft_config"):  # whose rows' masks have a generator's state each, 5 KB on a CPU
        assert found.nbytes_kept + found.nbytes_moved + found.nbytes_offloaded == pytest.approx(kept, rel=0.02)
    return report, kept, by_stock


@pytest.mark.parametrize(("how", "name", "family"), pairwise(HOW, CONFIGS, ["llama", "llama, LoRA", "bert", "gpt2"]))
def test_a_step_is_that_of_stock_with_the_same_checkpointing(how, name, family, monkeypatch):
    monkeypatch.setattr(modeling_utils, "save_on_cpu", CopiesAsOnCuda)
    stock, ours = (checkpointed(make(family), how) for _ in range(2))
    report, kept, by_stock = compare(stock, ours, CONFIGS[name], are_same=name != "tiles")
    assert kept <= by_stock and report.step.is_checkpointed_in_stock
    assert kept < 0.75 * by_stock or "every_n_layers" not in HOW[how], "what blocks that are left out keep is less"
    assert (report.step.nbytes_moved > 0) == ("offload" in HOW[how])


def test_what_it_moves_to_main_memory_is_told_apart_and_once(monkeypatch, caplog):
    monkeypatch.setattr(modeling_utils, "save_on_cpu", CopiesAsOnCuda)
    caplog.set_level("INFO", "hf_memsave")
    model, batch = checkpointed(make("llama"), "offload"), batch_for(make("llama"), SIZE)
    report = patch(model, MemSaveConfig())
    measure_kept(model, batch)  # a trial, which is counted, too
    model(**batch).loss.backward()
    moved = SIZE.layers * SIZE.u(4)
    assert report.step.nbytes_moved == moved
    begins = f"gradient checkpointing is on and moves {gib(moved)} to main memory: the first step keeps"
    advice = 'checkpoint="block", with offload=True, in its place keeps no more; with neither, more is kept and no'
    assert begins in caplog.text and advice in str(report) and begins in " ".join(str(report).split())


@pytest.mark.parametrize("rung", [None, "block"])
def test_advice_beside_it_is_true(rung):
    """Blocks that run again keep no more; without both, chosen products may be more than all that is kept."""
    model, batch = checkpointed(make("llama"), "products"), batch_for(make("llama"), SIZE)
    report = patch(model, MemSaveConfig(checkpoint=rung))
    model(**batch).loss.backward()
    kept, said = measure_kept(model, batch).total, str(report)
    model.activation_checkpointing_disable()
    patch(model, MemSaveConfig(checkpoint="block"), replace=True)
    assert measure_kept(model, batch).total <= kept
    if rung is None:
        assert 'checkpoint="block" in its place keeps no more; with neither, no block runs twice\n' in said
        patch(model, MemSaveConfig(), replace=True)
        assert measure_kept(model, batch).total < 1.05 * kept
    else:
        assert 'leave it out, as memsave="block" runs blocks again already\n' in said


@pytest.mark.parametrize("name", ["exact", "gate", "block"])
def test_selective_checkpointing_of_parts_of_ones_own_is_counted(name):
    stock, ours = make("llama"), make("llama")
    for model in (stock, ours):
        for layer in model.model.layers:
            layer.mlp.forward = functools.partial(
                checkpoint, layer.mlp.forward, use_reentrant=False, context_fn=PRODUCTS
            )
    report, *_ = compare(stock, ours, CONFIGS[name])
    products = SIZE.layers * SIZE.u(4) * (1 + 2 * ours.config.intermediate_size / SIZE.hidden)
    assert report.step.by_kind("kept")["selective checkpointing"] == products


def per_layer(model_of):
    kept = []
    for layers in (2, 4):
        model = model_of(replace(SIZE, layers=layers))
        kept.append(of_layers(measure_kept(model, batch_for(model, SIZE))))
    return (kept[1] - kept[0]) / 2


@pytest.mark.parametrize(("family", "most"), [("llama", 10), ("gpt2", 30), ("mixtral", 100), ("qwen3_moe", 110)])
def test_gate_keeps_of_a_block_what_trls_selective_does(family, most):
    """The block's input, attention's output and logsumexp; of experts, their outputs; ``most`` bytes a token more."""

    def selective(size):
        return checkpointed(make(family, size, dropout=0.0), "TRL")

    def gate(size):
        model = make(family, size, dropout=0.0)
        patch(model, MemSaveConfig(checkpoint="gate"))
        return model

    expected = 2 * SIZE.u(4) + 4 * SIZE.batch * SIZE.seq * SIZE.heads
    assert per_layer(selective) == pytest.approx(expected + torch.get_rng_state().nbytes, abs=64)
    expected += getattr(make(family).config, "num_experts_per_tok", 0) * SIZE.u(4)
    assert expected < per_layer(gate) < expected + most * SIZE.batch * SIZE.seq


@pytest.mark.parametrize("family", ["llama", "llama, LoRA", "bert", "gpt2"])
def test_every_second_block_keeps_as_much_as_the_first_half(family):
    """So ``memsave plan``, which tries every number of first layers, need not try that."""
    size = replace(SIZE, layers=4)
    every, first = (make(family, size) for _ in range(2))
    (every.get_base_model() if family.endswith("LoRA") else every).activation_checkpointing_enable(every_n_layers=2)
    patch(every, MemSaveConfig())
    patch(first, MemSaveConfig(checkpoint="block", layers={"checkpoint": 0.5}))
    batch = batch_for(every, size)
    assert_same(step(first, batch), step(every, batch))
    assert measure_kept(first, batch).total == pytest.approx(measure_kept(every, batch).total, rel=0.01)
