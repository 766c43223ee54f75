"""``MemSaveConfig.layers``: of each kind only the sites in the first blocks are converted, and they are still exact."""

import copy
import pickle

import pytest
from peft import LoraConfig, get_peft_model

from hf_memsave import MemSaveConfig, PatchError, measure_kept, patch, unpatch
from hf_memsave.patching.blocks import block_numbers, number_of
from hf_memsave.config import KINDS
from hf_memsave.ops import OPS, attention
from hf_memsave.patching.swap import binding_of
from support.families import Size, batch_for, build
from support.steps import assert_same, patched_classes, state_of, step

BLOCKS = 3
#: Wide enough that a mask takes more than the state of the generator that it is drawn from.
SIZE = Size(hidden=64, layers=BLOCKS, batch=4)
#: Family -> its kinds of site, with eager attention.
SITES = {
    "bert": ("activation", "norm", "dropout", "attention"),
    "gpt2": ("activation", "norm", "dropout", "attention"),
    "llama": ("activation", "norm", "attention"),
    "t5-encoder": ("activation", "norm", "dropout", "attention"),
}
CASES = [(family, kind) for family, kinds in SITES.items() for kind in kinds]


def eager(family, device):
    model = build(family, SIZE).to(device)
    model.set_attn_implementation("eager")
    return model


def only(kind, number):
    return MemSaveConfig(layers={**dict.fromkeys(KINDS, 0), kind: number})


def converted(report, kind):
    return {site.name for site in report.patched if site.op in OPS and OPS[site.op].setting == kind}


def test_an_encoders_blocks_come_before_a_decoders():
    numbers = block_numbers(build("t5-encoder", SIZE))
    assert list(numbers) == [f"encoder.block.{i}" for i in range(BLOCKS)] + [f"decoder.block.{i}" for i in range(2)]
    assert list(numbers.values()) == list(range(BLOCKS + 2))
    assert number_of("encoder.block.1.layer.0.layer_norm", numbers) == number_of("encoder.block.1", numbers) == 1
    assert number_of("encoder.block.10", numbers) == number_of("encoder.final_layer_norm", numbers) == 0


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_the_first_blocks_are_converted_and_no_other(family, kind):
    model = eager(family, "cpu")
    numbers = block_numbers(model)
    everywhere = patch(model)
    for number in range(len(numbers) + 2):
        report = patch(model, MemSaveConfig(layers={kind: number}))
        first = {name for name in converted(everywhere, kind) if number_of(name, numbers) < number}
        assert converted(report, kind) == first
        for other in set(SITES[family]) - {kind}:
            assert converted(report, other) == converted(everywhere, other)
        left = converted(everywhere, kind) - first
        reasons = {site.reason for site in report.skipped if site.name in left}
        assert reasons == ({f"layers={{{kind!r}: {number}}} was asked for"} if left else set())
        assert patched_classes(model).keys() >= first and not patched_classes(model).keys() & left
    assert report.sites == everywhere.sites


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_each_block_frees_more(family, kind, device):
    model = eager(family, device)
    batch = batch_for(model, SIZE)
    stock, count = measure_kept(model, batch).total, len(block_numbers(model))
    kept = [stock]
    for number in range(1, count + 1):
        patch(model, only(kind, number))
        kept.append(measure_kept(model, batch).total)
    patch(model)
    everything = measure_kept(model, batch).total
    assert kept == sorted(kept, reverse=True) and everything < stock and everything <= kept[-1]
    if kind in ("norm", "dropout") or (kind == "activation" and family != "t5-encoder"):  # a ReLU is at the floor
        assert len(set(kept[:BLOCKS])) == BLOCKS


@pytest.mark.parametrize(
    "layers", [{"norm": 1, "activation": 2, "dropout": 0}, {"attention": 1, "dropout": 2}], ids=str
)
@pytest.mark.parametrize("family", SITES)
def test_partly_converted_is_still_exact(family, layers, device):
    model = eager(family, device)
    batch = batch_for(model, SIZE)
    stock = step(model, batch)
    report = patch(model, {"layers": layers})
    assert report.skipped
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert patched_classes(other) == patched_classes(model)
        assert_same(step(other, batch), stock)
    report.undo()
    assert patched_classes(model) == {}


@pytest.mark.parametrize("config", [{}, {"activation": "invert", "norm": "output"}, {"storage": "int8"}], ids=str)
def test_another_number_of_blocks_replaces_the_one_before(config):
    model = eager("bert", "cpu")
    before = state_of(model)
    patch(model, config | {"layers": {"norm": 1}})
    once = {name: binding_of(module) for name, module in model.named_modules()}
    patch(model, config | {"layers": {"norm": 2}})
    patch(model, config | {"layers": {"norm": 1}})
    assert {name: binding_of(module) for name, module in model.named_modules()} == once
    unpatch(model)
    assert state_of(model) == before


def test_sdpa_is_converted_as_a_whole():
    model = build("bert", SIZE)
    for number, name, status in ((0, attention.STOCK_NAME, "skipped"), (1, attention.NAME, "patched")):
        report = patch(model, {"layers": {"attention": number}})
        assert model.config._attn_implementation == name
        assert {site.status for site in report.sites if site.op == "attention"} == {status}
    patch(model, {"layers": {"attention": 0}})
    assert model.config._attn_implementation == attention.STOCK_NAME


def test_no_block_of_any_kind_is_nothing():
    model = eager("bert", "cpu")
    with pytest.raises(PatchError, match=r"nothing to patch .*layers=\{'norm': 0\} was asked for"):
        patch(model, {"layers": dict.fromkeys(KINDS, 0)})
    assert patched_classes(model) == {}


@pytest.mark.parametrize("later", [False, True], ids=["before", "later"])
def test_adapters_count_by_the_block_they_are_in(later):
    model = build("llama", SIZE)
    config = {"layers": {"lora": 1, "dropout": 2}}
    if later:
        patch(model, config)
    lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
    model = get_peft_model(model, lora)
    if not later:
        patch(model, config)
    found = [n.split("layers.")[1] for n, c in patched_classes(model).items() if "layers." in n]
    assert {n[0] for n in found if n.endswith("lora_dropout.default")} == {"0", "1"}
    assert {n[0] for n in found if n.endswith(("q_proj", "down_proj"))} == {"0"}
