"""Stock PEFT on a patched model: the floor for any dropout and adapter dtype, with bits and habits of stock."""

import copy
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM

import hf_memsave
from hf_memsave import ConfigError, MemSaveConfig, measure_kept, patch, unpatch
from hf_memsave.patching.swap import is_patched
from support.families import FAMILIES, HALF, batch_for, build
from support.helpers import only_on_cpu
from support.lora import MODES, RANK, SIZE, adapted, assert_trains_like, autocast, outputs, pair, rank_terms
from support.steps import patched_classes
from support.thinned import thinned

FLOOR = {
    "bert": 10, "roberta": 10, "gpt2": 10, "t5-encoder": 10, "t5-decoder": 15, "t5-gated-encoder": 11.5,
    "llama": 10.5, "mistral": 10.5, "phi3": 10.5, "phi": 9,
}  # fmt: skip
AUTOCAST_FLOOR = {
    "bert": 12, "roberta": 12, "gpt2": 12, "t5-encoder": 12, "t5-decoder": 18, "t5-gated-encoder": 13.5,
    "llama": 12.5, "mistral": 12.5, "phi3": 12.5, "phi": 10,
}  # fmt: skip


# The floor.


def count_targets(model):
    return sum(name.endswith("lora_A") for name, _ in model.named_modules())


@pytest.mark.parametrize(("family", "mode", "dropout"), thinned(4, FLOOR, MODES, [0.05, 0.0]))
def test_a_layer_keeps_the_floor_and_the_rank_terms(family, mode, dropout, device):
    only_on_cpu(device)
    totals, targets = [], []
    for layers in (1, 2):
        size = replace(HALF, layers=layers)
        model = adapted(family, mode, dropout, size)
        targets.append(count_targets(model))
        patch(model)
        with autocast(mode):
            totals.append(measure_kept(model, batch_for(model, size)).total)
    u = HALF.u(4 if mode == "fp32" else 2)
    floor = (AUTOCAST_FLOOR if mode == "autocast" else FLOOR)[family] * u
    assert totals[1] - totals[0] <= 1.03 * (floor + rank_terms(targets[1] - targets[0], mode, size))


# Stock's bits.


@pytest.mark.parametrize(("family", "mode"), thinned(4, FAMILIES, MODES))
def test_adapters_train_like_stock_peft(family, mode, device):
    only_on_cpu(device)
    stock, ours = pair(adapted(family, mode))
    assert_trains_like(ours, stock, mode, steps=20 if family in ("bert", "llama") else 3)


# Stock's ways of working.


@pytest.mark.parametrize("safe", [False, True])
def test_merge_and_unmerge_are_stocks(safe):
    stock, ours = pair(adapted("llama").eval())
    for model in (stock, ours):
        model.merge_adapter(safe_merge=safe)
    assert torch.equal(outputs(ours), outputs(stock))
    for model in (stock, ours):
        model.unmerge_adapter()
    assert torch.equal(outputs(ours), outputs(stock))
    assert torch.equal(outputs(ours.merge_and_unload()), outputs(stock.merge_and_unload()))


def test_disabled_adapters_and_several_ones_are_stocks(device):
    only_on_cpu(device)
    stock = adapted("llama")
    stock.add_adapter("second", LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    stock, ours = pair(stock)
    with stock.disable_adapter(), ours.disable_adapter():
        assert torch.equal(outputs(ours), outputs(stock))
    for model in (stock, ours):
        model.set_adapter("second")
    assert_trains_like(ours, stock, steps=3)


def test_modules_to_save_and_checkpointing_train_like_stock(device):
    only_on_cpu(device)
    stock = adapted("llama", modules_to_save=["lm_head"])
    stock.enable_input_require_grads()
    stock.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_trains_like(*reversed(pair(stock)), steps=3)


def test_saved_adapters_are_stocks(tmp_path):
    ours = adapted("llama").eval()
    stock_keys = set(ours.state_dict())
    patch(ours)
    assert set(ours.state_dict()) == stock_keys
    ours.save_pretrained(tmp_path)
    assert "memsave" not in json.loads((tmp_path / "adapter_config.json").read_text())
    loaded = PeftModel.from_pretrained(build("llama", SIZE, torch.bfloat16), tmp_path).eval()
    assert torch.equal(outputs(loaded), outputs(ours.eval()))


def test_adapters_can_be_left_stock(device):
    only_on_cpu(device, "this count of bytes")
    model = adapted("llama", dropout=0.0)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    inputs = {(name, "_to_copy", 4 * SIZE.batch * SIZE.seq * layer.in_features) for name, layer in layers.items()}

    def casts_of_inputs():
        storages = measure_kept(model, batch_for(model, SIZE)).storages
        return inputs & {(s.module, s.op, s.nbytes) for s in storages}

    assert casts_of_inputs() == inputs != set()
    report = patch(model, MemSaveConfig(lora="stock"))
    assert {site.name for site in report.patched if site.op == "quiet"} == layers.keys()
    assert casts_of_inputs() == inputs
    patch(model, replace=True)
    assert casts_of_inputs() == set()


# One call for base and adapters.


def memsave_lora(**options):
    return hf_memsave.MemSaveLoraConfig(
        r=RANK, target_modules="all-linear", lora_dropout=0.05, init_lora_weights=False, **options
    )


def test_one_call_patches_base_and_adapters(device):
    only_on_cpu(device)
    torch.manual_seed(0)
    ours = get_peft_model(build("llama", SIZE, torch.bfloat16), memsave_lora()).train()
    stock = copy.deepcopy(ours)
    unpatch(stock)
    batch = batch_for(ours, SIZE)
    kept, before = measure_kept(ours, batch), measure_kept(stock, batch)
    assert kept.total < 0.45 * before.total
    of_base, of_adapters = "activation", "dropout"
    assert before.by_kind.keys() - kept.by_kind.keys() == {of_base, of_adapters}
    patch(ours)  # once more changes nothing
    assert measure_kept(ours, batch).total == kept.total
    assert_trains_like(ours, stock, steps=3)


def test_native_add_adapter_patches_too(device):
    only_on_cpu(device, "this count of bytes")
    kept, patched = [], []
    for memsave in (False, {"norm": "stock"}, True):
        model = build("llama", SIZE)
        model.add_adapter(memsave_lora(memsave=memsave))
        patched.append(set(patched_classes(model).values()))
        kept.append(measure_kept(model.train(), batch_for(model, SIZE)))
    assert patched[1] - patched[2] == {"LlamaRMSNorm"} and patched[0] == set()
    stock, ours, exact = kept
    assert exact.total < ours.total < stock.total
    assert "activation" in stock.by_kind.keys() - ours.by_kind.keys()
    assert ours.by_kind["dropout"] < stock.by_kind["dropout"] / 3  # adapters have the only ones


@pytest.mark.parametrize("config", [memsave_lora(memsave=False), LoraConfig(target_modules=["q_proj"])])
def test_without_the_field_peft_is_stock(config):
    model = get_peft_model(build("llama", SIZE), config)
    assert not any(is_patched(m) for m in model.modules())


@pytest.mark.long
def test_what_it_saves_loads_without_hf_memsave_and_without_a_warning(tmp_path):
    torch.manual_seed(0)
    build("llama", SIZE).save_pretrained(tmp_path / "base")
    for name, config in (("stock", LoraConfig(target_modules="all-linear")), ("ours", memsave_lora())):
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config).eval()
        model.save_pretrained(tmp_path / name)
    torch.save((batch_for(model, SIZE), outputs(model)), tmp_path / "expected.pt")
    script = (
        "import logging, sys, warnings, torch\n"
        "from peft import PeftModel; from transformers import AutoModelForCausalLM\n"
        "said, handler = set(), logging.Handler(logging.WARNING)\n"
        "say = lambda text: said.add(str(text).replace('ours', 'stock'))\n"
        "handler.emit = lambda record: say(record.getMessage())\n"
        "for name in ('', 'peft', 'transformers'): logging.getLogger(name).addHandler(handler)\n"
        "warnings.simplefilter('always'); warnings.showwarning = lambda message, *_: say(message)\n"
        "for name in ('stock', 'ours'):  # what libraries say by themselves, they say of stock's\n"
        "    base, before = AutoModelForCausalLM.from_pretrained('base'), set(said)\n"
        "    model = PeftModel.from_pretrained(base, name).eval()\n"
        "assert said <= before, said - before\n"
        "batch, expected = torch.load('expected.pt')\n"
        "torch.set_num_threads(1)\n"
        "assert type(model.peft_config['default']).__name__ == 'LoraConfig'\n"
        "assert torch.equal(model(**batch).logits.detach(), expected)\n"
        "assert 'hf_memsave' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_wrong_preset_is_refused_before_peft_touches_the_model():
    with pytest.raises(ConfigError, match="unknown preset 'nope'"):
        memsave_lora(memsave="nope")
