"""Every preset on models of several families: stock's loss to the bit, a gradient for every parameter, no byte more."""

from dataclasses import replace

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification

from hf_memsave import MemSaveConfig, measure_kept, patch
from hf_memsave.config import presets
from hf_memsave.tape import offload
from hf_memsave.tape.offload import Away
from support.families import QUOTED, batch_for, build
from support.helpers import assert_same_bits, halved, only_on_cpu
from support.lora import adapted


def make(family):
    if family != "vit":
        model = build(family)
        return model, batch_for(model)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8)).train()
    return model, {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.zeros(2, dtype=torch.long)}


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "t5-encoder", "vit"])
@pytest.mark.parametrize("name", presets())
def test_a_preset_trains_a_model_with_stocks_loss(device, family, name):
    only_on_cpu(device)
    model, batch = make(family)
    losses, totals = [], []
    for config in (None, name):
        if config:
            patch(model, config)
        totals.append(measure_kept(model, batch).total)
        torch.manual_seed(3)
        losses.append(model(**batch).loss)
    losses[1].backward()
    assert_same_bits(losses[1], losses[0])
    assert totals[1] <= totals[0]
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


def test_the_presets_of_papers_are_exact_but_in_one_field():
    exact = MemSaveConfig()
    for name, field in (("invact", "activation"), ("few-bit", "activation"), ("wta-crs", "linear")):
        found, stock = MemSaveConfig.preset(name).to_dict(), exact.to_dict()
        assert [key for key in stock if found[key] != stock[key]] == [field]


def test_max_runs_blocks_again_and_offloads_and_is_exact():
    exact, most = MemSaveConfig(), MemSaveConfig.preset("max")
    assert most == MemSaveConfig(checkpoint="block", offload=True)
    assert most.is_exact
    assert exact.is_exact


@pytest.mark.long
@pytest.mark.parametrize(("family", "has_lora"), halved(["bert", "llama", "gpt2", "t5-encoder"], [False, True]))
def test_max_has_stocks_bits_and_one_input_a_block(family, has_lora, monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST_NBYTES", 256)
    sizes = [replace(QUOTED, layers=layers, batch=2) for layers in (2, 4)]
    on_device = []
    for size in sizes:
        model = adapted(family, size=size) if has_lora else build(family, size)
        batch = batch_for(model, size)
        stock = a_step(model, batch)
        patch(model, "max")
        assert all(torch.equal(a, b) for a, b in zip(a_step(model, batch), stock, strict=True))
        torch.manual_seed(1)
        away = Away.total
        on_device.append(measure_kept(model, batch).total - (Away.total - away))
    itemsize = 2 if has_lora else 4
    assert (on_device[1] - on_device[0]) / 2 / sizes[0].u(itemsize) <= 1.05


def a_step(model, batch):
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
