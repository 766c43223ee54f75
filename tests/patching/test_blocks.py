"""``MemSaveConfig.layers``: of each kind only what is in the first blocks is converted, and that is still exact."""

import copy
import pickle

import pytest
from peft import LoraConfig, get_peft_model

from hf_memsave import MemSaveConfig, measure_kept, patch, unpatch
from hf_memsave.config.layers import KINDS
from hf_memsave.patching.blocks import block_numbers, number_of
from hf_memsave.patching.swap import patch_of
from support.families import Size, batch_for, build
from support.steps import assert_same, patched_classes, state_of, step

BLOCKS = 3
#: Wide enough that a mask takes more than the state of the generator that it is drawn from.
SIZE = Size(hidden=64, layers=BLOCKS, batch=4)
#: Family -> kind -> the classes of it; dropout is a function, whatever module calls it.
CLASSES = {
    "bert": {"activation": "GELUActivation Tanh", "norm": "LayerNorm", "dropout": "", "attention": "BertSelfAttention"},
    "gpt2": {"activation": "NewGELUActivation", "norm": "LayerNorm", "dropout": "", "attention": "GPT2Attention"},
    "llama": {"activation": "SiLUActivation", "norm": "LlamaRMSNorm", "attention": "LlamaAttention"},
    "t5-encoder": {"activation": "ReLU", "norm": "T5LayerNorm", "dropout": "", "attention": "T5Attention"},
}
#: A ReLU is at the floor, and eager attention without dropout keeps little else than its weights.
AT_THE_FLOOR = [("t5-encoder", "activation"), *((family, "attention") for family in CLASSES if family != "llama")]
CASES = [(family, kind) for family, kinds in CLASSES.items() for kind in kinds]


def eager(family, device):
    model = build(family, SIZE).to(device)
    model.set_attn_implementation("eager")
    return model


def only(kind, number):
    return MemSaveConfig(layers={**dict.fromkeys(KINDS, 0), kind: number})


def quiet(report):
    return {site.name for site in report.patched if site.op == "quiet"}


def test_an_encoders_blocks_come_before_a_decoders():
    numbers = block_numbers(build("t5-encoder", SIZE))
    assert list(numbers) == [f"encoder.block.{i}" for i in range(BLOCKS)] + [f"decoder.block.{i}" for i in range(2)]
    assert list(numbers.values()) == list(range(BLOCKS + 2))
    assert number_of("encoder.block.1.layer.0.layer_norm", numbers) == number_of("encoder.block.1", numbers) == 1
    assert number_of("encoder.block.10", numbers) == number_of("encoder.final_layer_norm", numbers) == 0


@pytest.mark.parametrize(("family", "kind"), [case for case in CASES if case[1] != "dropout"])
def test_the_modules_of_later_blocks_are_left_to_stock_and_no_other(family, kind):
    model = eager(family, "cpu")
    numbers = block_numbers(model)
    found = [name for name, m in model.named_modules() if type(m).__name__ in CLASSES[family][kind].split()]
    for number in range(len(numbers) + 2):
        report = patch(model, {"layers": {kind: number}}, replace=True)
        assert quiet(report) == {name for name in found if number_of(name, numbers) >= number}
    assert quiet(patch(model, replace=True)) == set()


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_each_block_frees_more(family, kind, device):
    model = eager(family, device)
    batch = batch_for(model, SIZE)
    stock, count = measure_kept(model, batch).total, len(block_numbers(model))
    kept = []
    for number in range(count + 1):
        patch(model, only(kind, number), replace=True)
        kept.append(measure_kept(model, batch).total)
    patch(model, replace=True)
    everything = measure_kept(model, batch).total
    assert kept == sorted(kept, reverse=True) and everything < kept[-1] and kept[0] <= stock
    if (family, kind) not in AT_THE_FLOOR:
        assert len(set(kept[:BLOCKS])) == BLOCKS


def test_sdpa_is_converted_block_by_block(device):
    model = build("llama", SIZE).to(device)  # with a mask, SDPA repeats k and v
    batch = batch_for(model, SIZE, padded=True)
    kept = []
    for number in range(BLOCKS + 1):
        patch(model, {"layers": {"attention": number}}, replace=True)
        kept.append(measure_kept(model, batch).total)
    assert len(set(kept)) == BLOCKS + 1 and kept == sorted(kept, reverse=True)


@pytest.mark.parametrize(
    "layers", [{"norm": 1, "activation": 2, "dropout": 0}, {"attention": 1, "dropout": 2}, dict.fromkeys(KINDS, 0)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("family", CLASSES)
def test_partly_converted_is_still_exact(family, layers, device):
    model = eager(family, device)
    batch = batch_for(model, SIZE)
    stock = step(model, batch)
    report = patch(model, {"layers": layers})
    assert quiet(report)
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
    once = {name: patch_of(module) for name, module in model.named_modules()}
    patch(model, config | {"layers": {"norm": 2}}, replace=True)
    assert {name: patch_of(module) for name, module in model.named_modules()} != once
    patch(model, config | {"layers": {"norm": 1}}, replace=True)
    assert {name: patch_of(module) for name, module in model.named_modules()} == once
    unpatch(model)
    assert state_of(model) == before


@pytest.mark.parametrize("later", [False, True], ids=["before", "later"])
def test_adapters_count_by_the_block_they_are_in(later, device):
    kept = {}
    for number in (0, 1, 2, BLOCKS):
        model = build("llama", SIZE).to(device)
        config = {"layers": {"lora": number, "dropout": 2}}
        if later:
            patch(model, config)
        lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
        model = get_peft_model(model, lora)
        if not later:
            patch(model, config)
        patched = [n.split("layers.")[1] for n in patched_classes(model) if n.endswith(("q_proj", "down_proj"))]
        assert {int(name[0]) for name in patched} == set(range(number, BLOCKS))
        kept[number] = measure_kept(model, batch_for(model, SIZE)).total
    assert list(kept.values()) == sorted(kept.values(), reverse=True)
