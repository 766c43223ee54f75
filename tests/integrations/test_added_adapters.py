"""Adapters that come before, with or after patching; and what happens to them, and to their models, in between."""

import copy

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from hf_memsave import WTACRS, ConfigError, MemSaveConfig, MemSaveLoraConfig, PatchError, measure_kept, patch, unpatch
from hf_memsave.integrations import adapters
from hf_memsave.patching.swap import is_patched, patch_of
from support.helpers import only_on_cpu
from support.lora import SIZE, adapted, quantized
from support.steps import assert_same, gradients, step
from support.zoo import batch_for, build

LINEARS = ["q_proj", "v_proj"]


def lora(**options):
    return LoraConfig(target_modules=LINEARS, lora_dropout=0.1, **options)


#: A configuration that has something to do in the linears of adapters; the exact one has not.
SAMPLED = MemSaveConfig(linear=WTACRS(budget=0.3, targets=("lora_A",)))


def sampled(model):
    loras = (pair for pair in model.named_modules() if "lora_A" in pair[0])
    return {name: is_patched(m) for name, m in loras if type(m).__name__ == "Linear"}


def test_linears_of_adapters_keep_their_classes_and_what_they_keep_is_that_of_a_model_patched_later(device):
    kept = []
    for first in (True, False):
        model = build("llama", SIZE).to(device)
        if first:
            patch(model)
        model = get_peft_model(model, lora())
        if not first:
            patch(model)
        assert not any(is_patched(m) for m in model.modules() if isinstance(m, nn.Linear))
        assert all(is_patched(m) for m in model.modules() if isinstance(m, peft.tuners.lora.Linear))
        kept.append(measure_kept(model, batch_for(model, SIZE)).total)
    assert kept[0] == kept[1]


def test_adapters_added_to_a_patched_model_are_sampled_as_its_config_says(tmp_path):
    build("llama", SIZE).save_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path, memsave=SAMPLED)
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], lora_dropout=0.1))
    model.add_adapter("second", LoraConfig(target_modules=["v_proj"]))
    assert len(sampled(model)) == 2 * SIZE.layers and all(sampled(model).values())
    unpatch(model)
    model.add_adapter("third", LoraConfig(target_modules=["o_proj"]))
    assert not any(is_patched(m) for m in model.modules())


def test_only_the_patched_part_of_a_model_is_patched_again():
    pair = nn.ModuleDict({"ours": build("llama", SIZE), "stock": build("llama", SIZE)})
    patch(pair["ours"], SAMPLED)
    peft.inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), pair)
    found = sampled(pair)
    assert found == {name: name.startswith("ours") for name in found} and len(found) == 2 * SIZE.layers


def test_the_report_names_adapters_that_came_unseen(monkeypatch):
    model = build("llama", SIZE)
    report = patch(model, SAMPLED)
    assert report.added == () and "since" not in str(report)
    tuner = peft.tuners.tuners_utils.BaseTuner  # as it is where nothing sees PEFT come
    monkeypatch.setattr(tuner, "inject_adapter", tuner.inject_adapter.__wrapped__)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"], lora_dropout=0.1))
    assert len(report.added) == 2 * SIZE.layers  # each layer, and the A that it holds
    assert "4 sites were added since" in str(report) and "call patch(model, report.config)" in str(report)
    patch(model, report.config)
    assert report.added == ()


def test_a_config_of_ours_that_asks_for_another_is_refused_before_an_adapter_is_in():
    model = build("llama", SIZE)
    patch(model, MemSaveConfig(dropout="mask"))
    before = set(model.state_dict())
    with pytest.raises(PatchError, match=r"patched with MemSaveConfig\(dropout='mask'\), got MemSaveConfig\(\), the"):
        get_peft_model(model, MemSaveLoraConfig(target_modules=LINEARS, memsave={"dropout": "auto"}))
    assert set(model.state_dict()) == before
    get_peft_model(model, MemSaveLoraConfig(target_modules=LINEARS, lora_dropout=0.1))  # True: what the model has
    assert patch_of(model).config.dropout == "mask"


def test_an_adapter_that_cannot_be_patched_is_added_all_the_same(monkeypatch):
    model = get_peft_model(build("llama", SIZE), lora())
    patch(model, SAMPLED)
    linear = model.base_model.model.model.layers[0].self_attn.q_proj.lora_A["default"]
    linear.forward = lambda x: x
    messages = []
    monkeypatch.setattr(adapters.logger, "warning", lambda text, *args: messages.append(text % args))
    model.add_adapter("second", lora())
    assert set(model.peft_config) == {"default", "second"}
    assert len(messages) == 1 and "layers.0.self_attn.q_proj stays as PEFT made it" in messages[0]


def test_a_model_that_cannot_be_patched_is_refused_before_an_adapter_is_in():
    model = build("llama", SIZE)
    linear = model.model.layers[0].mlp.up_proj
    linear.forward = lambda x: x
    before = set(model.state_dict())
    with pytest.raises(PatchError, match="has a forward of its own"):
        get_peft_model(model, MemSaveLoraConfig(target_modules=LINEARS, memsave={"linear": {"budget": 0.3}}))
    assert set(model.state_dict()) == before


@pytest.mark.parametrize("options", [{"velora_config": peft.VeloraConfig()}, {"target_parameters": ["x"]}], ids=str)
def test_adapters_that_cannot_be_saved_are_refused_when_asked_for(options):
    with pytest.raises(ConfigError, match=rf"got {next(iter(options))}, whose own .* Use peft.LoraConfig"):
        MemSaveLoraConfig(target_modules=LINEARS, **options)
    MemSaveLoraConfig(target_modules=LINEARS, memsave=False, **options)
    with pytest.raises(ConfigError, match="unknown preset 'nope'"):
        MemSaveLoraConfig(memsave="nope")


@pytest.mark.parametrize("change", ["merge", "write"])
def test_a_quantized_weight_changed_before_backward_is_seen(change, saved, device):
    only_on_cpu(device)
    found = []
    for patched in (True, False):
        model = quantized(saved(SIZE), 4, use_dora=True)
        if patched:
            patch(model)
        torch.manual_seed(3)
        loss = model(**batch_for(model, SIZE)).loss
        if change == "merge":
            model.merge_adapter()
        else:
            with torch.no_grad():
                model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight.bitwise_xor_(17)
        try:
            loss.backward()
        except RuntimeError as error:
            assert patched and change == "write" and "modified by an inplace operation" in str(error)
            return
        found.append(gradients(model))
    assert change == "merge" and len(found[0]) > 20
    assert_same(*found)


class Halved(nn.Linear):
    """As a quantization-aware adapter would be."""

    def forward(self, input):
        return super().forward(input) * 0.5


@pytest.mark.parametrize("how", ["hook", "class", "dtypes"])
def test_altered_adapters_have_stocks_gradients(how, device):
    """DoRA with another lora_B; and two adapters of different dtypes at once."""
    only_on_cpu(device)
    stock = adapted("llama", "fp32", 0.0, use_dora=True)
    if how == "dtypes":
        stock.add_adapter("second", lora(init_lora_weights=False))
        for name, parameter in stock.named_parameters():
            if ".second." in name:
                parameter.data = parameter.data.bfloat16()
        stock.base_model.set_adapter(["default", "second"])
    ours = copy.deepcopy(stock)
    for module in (m for model in (stock, ours) for n, m in model.named_modules() if n.endswith("lora_B.default")):
        if how == "hook":
            module.register_forward_hook(lambda module, args, output: output * 1.5)
        elif how == "class":
            module.__class__ = Halved
    patch(ours)
    batch = batch_for(stock, SIZE)
    expected = step(stock, batch)
    assert any("magnitude" in name for name in expected)
    assert {g.dtype for g in expected.values()} == {torch.float32, *[torch.bfloat16] * (how == "dtypes")}
    assert_same(step(ours, batch), expected)
