"""``MemSaveConfig.layers``: of each kind only what is in the first blocks is converted, and that is still exact."""

import copy
import pickle

import pytest
from peft import LoraConfig, get_peft_model

from hf_memsave import MemSaveConfig, PatchError, measure_kept, patch
from hf_memsave.config.config import KINDS
from hf_memsave.patching.blocks import block_at, block_numbers
from support.steps import assert_same, patched_classes, step
from support.zoo import Size, batch_for, build

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
#: Eager attention without dropout keeps little else than its weights.
AT_THE_FLOOR = [("bert", "attention")]
CASES = [(family, kind) for family, kinds in CLASSES.items() for kind in kinds if family in ("bert", "llama")]


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
    assert block_at("encoder.block.1.layer.0.layer_norm", numbers) == block_at("encoder.block.1", numbers) == 1
    assert block_at("encoder.block.10", numbers) is block_at("encoder.final_layer_norm", numbers) is None


@pytest.mark.parametrize("family", CLASSES)
def test_the_modules_of_later_blocks_are_left_to_stock_and_no_other(family):
    model = eager(family, "cpu")
    numbers = block_numbers(model)
    for kind, classes in CLASSES[family].items():
        found = [name for name, m in model.named_modules() if type(m).__name__ in classes.split()]
        for number in range(len(numbers) + 1):
            report = patch(model, {"layers": {kind: number}}, replace=True)
            assert quiet(report) == {name for name in found if (block_at(name, numbers) or 0) >= number}
        with pytest.raises(PatchError, match=rf"\['{kind}'\]: expected at most {len(numbers)} blocks, as .* got 99"):
            patch(model, {"layers": {kind: 99}}, replace=True)
    assert quiet(patch(model, replace=True)) == set()
    block = model.get_submodule(next(iter(numbers)))
    assert patch(block, {"layers": {"norm": 99}}, replace=True).config.layers  # a part, of a model that has as many


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_each_block_frees_more(family, kind, device):
    model = eager(family, device)
    batch = batch_for(model, SIZE)
    stock, count, kept = measure_kept(model, batch).total, len(block_numbers(model)), []
    for number in range(count + 1):
        patch(model, only(kind, number), replace=True)
        kept.append(measure_kept(model, batch).total)
    patch(model, replace=True)
    everything = measure_kept(model, batch).total
    assert kept == sorted(kept, reverse=True) and everything < kept[-1] and kept[0] <= stock
    if (family, kind) not in AT_THE_FLOOR:
        assert len(set(kept[:BLOCKS])) == BLOCKS


@pytest.mark.parametrize(
    ("family", "layers"),
    [("bert", {"attention": 1, "dropout": 2}), ("gpt2", {"norm": 1, "activation": 2, "dropout": 0}),
     ("t5-encoder", dict.fromkeys(KINDS, 0))],
    ids=str,
)  # fmt: skip
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
        ops = {site.name.split("layers.")[1]: site.op for site in patch(model, config).patched if "_proj" in site.name}
        assert ops == {name: "lora" if int(name[0]) < number else "quiet" for name in ops} and len(ops) == 2 * BLOCKS
        kept[number] = measure_kept(model, batch_for(model, SIZE)).total
    assert list(kept.values()) == sorted(kept.values(), reverse=True)
