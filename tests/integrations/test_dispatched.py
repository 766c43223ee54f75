"""Models loaded in other ways: offloaded by Accelerate, or with adapters."""

import types

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import hf_memsave
from hf_memsave import ConfigError, MemSaveConfig
from hf_memsave.patching.swap import is_patched, patch_of
from hf_memsave.tape import current
from support.helpers import only_on_cpu
from support.steps import assert_same, patched_classes, step
from support.zoo import batch_for, build

OFFLOADED = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0", "lm_head"), "cpu")
OFFLOADED |= dict.fromkeys(("model.layers.1", "model.norm"), "disk")


@pytest.fixture
def dispatched(saved, tmp_path, device):
    only_on_cpu(device, "a map of CPU and disk")

    def load(**options):
        return AutoModelForCausalLM.from_pretrained(saved(), device_map=OFFLOADED, offload_folder=tmp_path, **options)

    return load


def test_an_offloaded_models_hooks_call_our_forward_under_our_tape_and_undo_rebinds_them(dispatched):
    model = dispatched(memsave=True)
    hooked = [m for m in model.modules() if "_old_forward" in m.__dict__ and is_patched(m)]
    assert {type(m).__name__ for m in hooked} == {"LlamaForCausalLM", "LlamaDecoderLayer"}
    for module in hooked:
        assert isinstance(module._old_forward, types.MethodType)
        assert module._old_forward.__func__ is type(module).forward
    taped = []
    for module in (model.model.norm, model.model.layers[1].mlp):
        module.register_forward_pre_hook(lambda *_: taped.append(current() is not None))
    model(input_ids=torch.arange(5, 15)[None])
    assert taped == [True, True]
    hf_memsave.unpatch(model)
    for module in model.modules():
        if "_old_forward" in module.__dict__:
            assert module._old_forward.__func__ is type(module).forward
    assert patched_classes(model) == {}


def test_an_offloaded_model_gives_stocks_bits(dispatched):
    results = []
    for options in ({"memsave": True}, {}):
        model = dispatched(**options).train()
        embedded = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        out = model(inputs_embeds=embedded, use_cache=False)
        out.logits.square().sum().backward()
        results.append({"logits": out.logits.detach(), "grad": embedded.grad})
    assert_same(*results)


def taped_norm_calls(model):
    """Whether our tape is on while each norm runs, in one forward."""
    norms, seen = [module for module in model.modules() if type(module).__name__ == "LlamaRMSNorm"], []
    handles = [norm.register_forward_pre_hook(lambda *_: seen.append(current() is not None)) for norm in norms]
    model(**batch_for(model))
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("order", ["patched, hooked", "hooked, patched", "patched, hooked, left"])
def test_hooks_and_patches_come_in_any_order(order, device):
    """Also where Accelerate, as its hooks are removed, leaves a forward on the instance."""
    model = build("llama").to(device)
    for what in order.split(", "):
        if what == "patched":
            hf_memsave.patch(model)
        elif what == "hooked":
            for module in model.modules():
                add_hook_to_module(module, ModelHook())
        else:
            remove_hook_from_module(model, recurse=True)
    assert taped_norm_calls(model) == [True] * 5
    hf_memsave.unpatch(model)
    assert taped_norm_calls(model) == [False] * 5


def test_an_adapter_on_a_patched_base_is_stock_again_for_false_and_load_adapter_says_what_to_do(tmp_path, device):
    only_on_cpu(device)
    model = get_peft_model(build("llama"), LoraConfig(r=4))
    model.save_pretrained(tmp_path)
    base = build("llama")
    hf_memsave.patch(base, "gate")
    loaded = PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    assert patched_classes(loaded) != {}
    with pytest.raises(ConfigError, match=r"load_adapter: .*Use hf_memsave\.patch\(model, 'gate'\)"):
        loaded.load_adapter(tmp_path, "other", memsave="gate")
    loaded.load_adapter(tmp_path, "other")
    hf_memsave.patch(base := build("llama"), "gate")
    assert patched_classes(PeftModel.from_pretrained(base, tmp_path, memsave=False)) == {}


def test_an_adapter_folder_loads_patched_and_trains_with_stocks_bits(saved, tmp_path, device):
    only_on_cpu(device)
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_dropout=0.1, init_lora_weights=False)
    get_peft_model(LlamaForCausalLM.from_pretrained(saved()), config).save_pretrained(tmp_path)

    def on_a_base(folder, **options):
        return PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(saved()), folder, **options)

    for load in (AutoModelForCausalLM.from_pretrained, AutoPeftModelForCausalLM.from_pretrained, on_a_base):
        with pytest.raises(ConfigError, match="unknown preset 'nonsense'"):
            load(tmp_path, memsave="nonsense")
        results = []
        for options in ({}, {"memsave": "gate"}):
            model = load(tmp_path, **options).train()
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("lora_" in name)
            results.append(step(model, batch_for(model)))
        found = {type(m).__name__: patch_of(m).config for m in model.modules() if is_patched(m)}
        assert found.keys() == {type(model).__name__, "LlamaDecoderLayer", "Linear"}  # PEFT's
        assert found["LlamaDecoderLayer"] == MemSaveConfig(checkpoint="gate")
        assert_same(*results)
        assert len(results[0]) == 1 + 8  # A and B of q and v of two layers
