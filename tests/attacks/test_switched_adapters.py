"""Adapters switched between a forward and its backward: a block that runs again must not take the other ones."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_memsave import KeptTensorChangedError, MemSaveConfig, patch
from support.families import Size, batch_for, build

SIZE = Size()


def two_adapters():
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = get_peft_model(build("llama", SIZE, dropout=0.0), lora)
    model.add_adapter("other", lora)
    return model.train()


def loss_of(model):
    return model(**batch_for(model, SIZE)).loss


def switch(model):
    model.set_adapter("other")


def scale(model):
    next(m for n, m in model.named_modules() if n.endswith("q_proj")).scale_layer(3.0)


def disable(model):
    model.base_model.disable_adapter_layers()


@pytest.mark.parametrize("change", [switch, scale, disable])
def test_a_block_does_not_run_again_with_others(change):
    model = two_adapters()
    patch(model, MemSaveConfig(checkpoint="block"))
    loss = loss_of(model)
    change(model)
    with pytest.raises(KeptTensorChangedError, match="adapters that were switched"):
        loss.backward()


@pytest.mark.parametrize("checkpoint", [None, "gate", "block"])
def test_a_forward_of_each_before_both_backwards(checkpoint):
    found = []
    for config in (None, MemSaveConfig(checkpoint=checkpoint)):
        model = two_adapters()
        if config is not None:
            patch(model, config)
        losses = {}
        for name in ("default", "other"):
            model.set_adapter(name)
            losses[name] = loss_of(model)
        for name, loss in losses.items():  # back to what the forward had
            model.set_adapter(name)
            loss.backward()
        found.append([p.grad for n, p in model.named_parameters() if "lora_" in n])
    assert all(g is not None for g in found[0])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
