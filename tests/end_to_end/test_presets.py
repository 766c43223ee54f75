"""Every preset on models of several families: stock's loss to the bit, a gradient for every parameter, no byte more."""

from dataclasses import replace

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification

from hf_memsave import WTACRS, MemSaveConfig, measure_kept, patch
from hf_memsave.config.config import presets
from hf_memsave.tape import offload
from hf_memsave.tape.offload import Away
from support.families import MODES, QUOTED, Size, batch_for, build, step_in
from support.helpers import assert_same_bits, halved, only_on_cpu
from support.lora import adapted
from support.steps import assert_same, step


def make(family):
    if family != "vit":
        model = build(family)
        return model, batch_for(model)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8)).train()
    return model, {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.zeros(2, dtype=torch.long)}


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "t5-encoder", "vit"])
def test_a_preset_trains_a_model_with_stocks_loss(device, family):
    only_on_cpu(device)
    model, batch = make(family)
    stock, kept = step(model, batch), measure_kept(model, batch).total
    for name in presets():
        patch(model, name, replace=True)
        ours = step(model, batch)
        assert_same_bits(ours["loss"], stock["loss"], name)
        assert measure_kept(model, batch).total <= kept, name
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad), name


def test_the_presets_of_papers_are_exact_but_in_one_field():
    exact = MemSaveConfig()
    for name, field in (("invact", "activation"), ("few-bit", "activation"), ("wta-crs", "linear")):
        found, stock = MemSaveConfig.preset(name).to_dict(), exact.to_dict()
        assert [key for key in stock if found[key] != stock[key]] == [field]
    assert exact.is_exact


def test_max_runs_blocks_again_and_offloads_and_is_exact():
    most = MemSaveConfig.preset("max")
    assert most == MemSaveConfig(checkpoint="block", offload=True)
    assert most.is_exact


@pytest.mark.long
@pytest.mark.parametrize(("family", "has_lora"), halved(["bert", "llama", "gpt2", "t5-encoder"], [False, True]))
def test_max_has_stocks_bits_and_one_input_a_block(family, has_lora, monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST_NBYTES", 256)
    on_device = []
    for layers in (2, 4):
        size = replace(QUOTED, layers=layers, batch=2)
        model = adapted(family, size=size) if has_lora else build(family, size)
        batch = batch_for(model, size)
        stock = step(model, batch)
        patch(model, "max")
        assert_same(step(model, batch), stock)
        away = Away.total
        on_device.append(measure_kept(model, batch).total - (Away.total - away))
    assert (on_device[1] - on_device[0]) / 2 / size.u(2 if has_lora else 4) <= 1.05


#: Setting -> the largest relative error of the gradients: twice what is measured, or more.
APPROXIMATE = {
    "invert": (MemSaveConfig(activation="invert"), 0.02),
    "precision bit": (MemSaveConfig(activation="precision_bit"), 0.02),
    "few bits": (MemSaveConfig(activation="few_bit"), 0.02),
    "output": (MemSaveConfig(norm="output"), 0.02),
    "int8": (MemSaveConfig(storage="int8"), 0.04),
    "int4": (MemSaveConfig(storage="int4"), 0.3),
    "rows": (MemSaveConfig(linear=WTACRS()), 3.0),
    "rows in int8": (MemSaveConfig(linear=WTACRS(), storage="int8"), 3.0),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5-decoder"])
def test_approximate_settings_run_and_are_near_at_odd_sizes(device, family, dtype):
    """Batches of 3 x 29 tokens, models of width 24: no tensor is a whole number of a code's blocks."""
    odd = Size(hidden=24, heads=3, layers=2, batch=3, seq=29)
    model = build(family, odd, MODES[dtype]).to(device)
    batch = batch_for(model, odd)
    stock = step_in(dtype, model, batch)
    gradients = [name for name in stock if name != "loss"]
    size = sum(float(stock[name].double().square().sum()) for name in gradients)
    for name, (config, limit) in APPROXIMATE.items():
        patch(model, config, replace=True)
        got = [step_in(dtype, model, batch) for _ in range(3)][-1]
        far = sum(float((got[key].double() - stock[key].double()).square().sum()) for key in gradients)
        assert (far / size) ** 0.5 < limit, name
