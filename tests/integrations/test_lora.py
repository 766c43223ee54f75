"""Stock PEFT on a patched model: the floor for any dropout and adapter dtype, with bits and habits of stock."""

import copy
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer

import hf_memsave
from hf_memsave import MemSaveConfig, measure_kept, patch, unpatch
from hf_memsave.patching.swap import is_patched
from support.helpers import only_on_cpu, thinned
from support.lora import MODES, RANK, SIZE, adapted, assert_trains_like, autocast, outputs, pair, rank_terms
from support.steps import patched_classes
from support.zoo import FAMILIES, HALF, batch_for, build

#: Family -> what a layer keeps, in u; and under autocast, in u of bf16.
FLOOR = {
    **dict.fromkeys(("bert", "roberta", "gpt2", "t5-encoder"), (10, 12)), "t5-decoder": (15, 18),
    "t5-gated-encoder": (11.5, 13.5), **dict.fromkeys(("llama", "mistral", "phi3"), (10.5, 12.5)), "phi": (9, 10),
}  # fmt: skip


@pytest.mark.parametrize(("family", "mode", "dropout"), thinned(5, FLOOR, MODES, [0.05, 0.0]))
def test_a_layer_keeps_the_floor_and_the_rank_terms(family, mode, dropout, device):
    only_on_cpu(device)
    totals, targets = [], []
    for layers in (1, 2):
        size = replace(HALF, layers=layers)
        model = adapted(family, mode, dropout, size)
        targets.append(sum(name.endswith("lora_A") for name, _ in model.named_modules()))
        patch(model, {"dropout": "seed"})
        with autocast(mode):
            totals.append(measure_kept(model, batch_for(model, size)).total)
    u = HALF.u(4 if mode == "fp32" else 2)
    floor = FLOOR[family][mode == "autocast"] * u
    assert totals[1] - totals[0] <= 1.03 * (floor + rank_terms(targets[1] - targets[0], mode, size))


@pytest.mark.parametrize(("family", "mode"), thinned(4, FAMILIES, MODES))
def test_adapters_train_like_stock_peft(family, mode, device):
    only_on_cpu(device)
    stock, ours = pair(adapted(family, mode))
    assert_trains_like(ours, stock, mode, steps=8 if family in ("bert", "llama") else 3)


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
    assert ours.by_kind.get("dropout", 0) < stock.by_kind["dropout"] / 3  # adapters have the only ones


@pytest.mark.parametrize("config", [memsave_lora(memsave=False), LoraConfig(target_modules=["q_proj"])])
def test_without_the_field_peft_is_stock(config):
    model = get_peft_model(build("llama", SIZE), config)
    assert not any(is_patched(m) for m in model.modules())


def test_what_it_saves_is_a_stock_adapter_to_the_byte(tmp_path):
    """And so loads where hf_memsave is not."""
    files = {}
    for name in ("LoraConfig", "MemSaveLoraConfig"):
        config = memsave_lora()
        if name == "LoraConfig":
            config = LoraConfig(**config.to_dict())
        torch.manual_seed(0)
        model = get_peft_model(build("llama", SIZE), config).eval()
        model.save_pretrained(tmp_path / name)
        files[name] = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
    assert files["LoraConfig"] == files["MemSaveLoraConfig"] and len(files["LoraConfig"]) >= 2
    loaded = PeftModel.from_pretrained(build("llama", SIZE), tmp_path / "MemSaveLoraConfig").eval()
    assert type(loaded.peft_config["default"]) is LoraConfig
    assert torch.equal(outputs(loaded), outputs(model))
