"""Kept memory per layer at the size in which it is quoted: every live storage, the difference of two depths."""

import functools
from dataclasses import replace

import pytest
import torch

from hf_memsave import measure_kept, patch
from support.families import FAMILIES, MODES, MORE, QUOTED, ZOO, batch_for, build
from support.helpers import BYTES, halved, of_layers, only_on_cpu
from support.lora import adapted, autocast, quantized

pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False", "ignore::FutureWarning", "ignore::UserWarning"),
]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

#: The fewest u a layer: norm inputs (2), q, k, v, o (4; LLaMA's k and v have half the heads) and the MLP's inner width
#: (4; gated 2 x 2.75); a cross-attention has a norm and q, k, v, o more; Phi's two branches share one norm.
FLOOR = {
    **dict.fromkeys(("bert", "roberta", "distilbert", "electra", "gpt2", "opt", "t5-encoder"), 10),
    **dict.fromkeys(("llama", "mistral", "phi3", "qwen2", "qwen3", "gemma"), 10.5),
    "t5-decoder": 15, "t5-gated-encoder": 11.5, "phi": 9,
}  # fmt: skip
#: In this order: inputs of norms; q, k, v; probabilities; attention's output; MLP or experts. An input of a norm is a
#: residual sum or the product that, with an earlier sum, makes it; k and v have half the heads.
FLOOR |= {
    "gemma2": 2 + 2 + 2 + 1 + 5.5,  # norms on both sides: both sums are remade; seq / head size = 2u of probabilities
    "gemma3": 2 + 2 + 1 + 5.5,  # q and k before their norms
    "olmo2": 2 + 2 + 1 + 5.5,  # norms after the products only, whose sums the next products take
    "glm4": 2 + 2 + 1 + 5.5,  # norms on both sides; gate and up are one product
    "cohere2": 1 + 2 + 1 + 5.5,  # one norm for both branches
    "modernbert": 2 + 3 + 1 + 5.5,  # q, k and v are one product, the MLP's input and gate too
    "bart-encoder": 2 + 3 + 1 + 4,
    "bart-decoder": 3 + 2 * (3 + 1) + 4,  # a cross-attention more
    "whisper-encoder": 2 + 3 + 1 + 4,
    "whisper-decoder": 3 + 2 * (3 + 1) + 4,
    "gpt_neox": 1 + 3 + 1 + 4,  # both norms have the same input
    "starcoder2": 2 + 2 + 1 + 4,
    "mixtral": 2 + 2 + 1 + 2 * (2 + 1),  # two experts a token: gate and up, and the result, for the router's gradient
    "qwen3_moe": 2 + 2 + 1 + 2 * (2 + 1),
    "gpt_oss": 2 + 2 + 2 + 1 + 2 * (2 + 1),  # eager, with a column of sinks
    "deepseek_v3": 2 + (0.5 + 1 + 0.3125 + 1.75) + 1 + 2 * (1 + 1) + 1,  # q, k and v made of latents; a shared expert
}
#: Where no residual sum is kept, one is every second layer, so that backward's chains stay short: half a u a layer.
CHAINED = ("gemma2", "gemma3", "olmo2", "glm4")
#: Of the floor: what a layer may keep.
SLACK = dict.fromkeys(FAMILIES + MORE, 1.03) | dict.fromkeys(ZOO, 1.045) | dict.fromkeys(CHAINED, 1.065)

#: LoRA, r=8, dropout .05, all linears, fp32 adapters on a bf16 base: the floor, lora_A's outputs (.0625 each), and a
#: generator's state (.019) for each dropout.
LORA = {"bert": 10.6, "gpt2": 10.43, "llama": 11.13, "phi": 9.6, "phi3": 10.93}
#: On a quantized base, prepared for training in k bits: 8-bit linears keep fp32, NF4 computes in bf16.
QUANTIZED = {
    ("llama", 8): 10.85, ("bert", 8): 10.35, ("gpt2", 8): 10.25,
    ("llama", 4): 6.6, ("bert", 4): 6.35, ("gpt2", 4): 7.25,
}  # fmt: skip


@pytest.fixture(autouse=True)
def claimed():
    only_on_cpu(DEVICE, BYTES)


@functools.cache
def kept(family, mode, layers, padded=False, patched=True, batch=QUOTED.batch):
    size = replace(QUOTED, layers=layers, batch=batch)
    model = build(family, size, MODES[mode]).to(DEVICE)
    if patched:
        patch(model)
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=mode == "autocast"):
        return measure_kept(model, batch_for(model, size, padded)).total


def u_per_layer(family, mode, padded=False, patched=True, last=4):
    """The mean of an even number of layers, as every second one may keep a residual sum for the one before it too.

    A T5 decoder's third layer pays for all: there its stack's bias and the encoder's output are kept, once.
    """
    first, last = (4, last + 2) if family == "t5-decoder" else (2, last)
    itemsize = 4 if mode == "fp32" else 2
    bytes_ = kept(family, mode, last, padded, patched) - kept(family, mode, first, padded, patched)
    return bytes_ / (last - first) / QUOTED.u(itemsize)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "mode", "padded"),
    [*halved(FAMILIES + MORE, ["bf16", "fp32"], [False, True]), *halved(ZOO, ["fp32", "bf16"], [False])],
)
def test_a_layer_keeps_its_floor(family, mode, padded):
    if family in ZOO:
        only_on_cpu(DEVICE, "a figure")
    found = u_per_layer(family, mode, padded, last=6 if family in ZOO else 4)
    assert FLOOR[family] <= found <= SLACK[family] * FLOOR[family]


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES + MORE)
def test_a_layer_keeps_its_floor_under_autocast(family):
    """With fp32 weights, every second layer keeps an fp32 sum where the others keep a bf16 product."""
    assert u_per_layer(family, "autocast", last=6) <= SLACK[family] * (FLOOR[family] + 0.5)


@pytest.mark.long
@pytest.mark.parametrize(("family",), halved(FAMILIES + MORE))
def test_no_cast_of_a_weight_is_kept_under_autocast(family):
    def of_two_layers(batch):
        return kept(family, "autocast", 6, batch=batch) - kept(family, "autocast", 4, batch=batch)

    whatever_the_batch = 2 * of_two_layers(1) - of_two_layers(2)
    weights = 2 * 12 * QUOTED.hidden**2 * 2
    assert whatever_the_batch < 0.03 * weights


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_adds_at_most_one_mask_per_forward(family):
    masks = 1
    if family.startswith("t5"):  # encoder, decoder and cross-attention have one each, with the bias of every head
        masks = 3 * QUOTED.heads
    mask = masks * QUOTED.batch * QUOTED.seq * QUOTED.seq * (2 + 1)  # in bf16, and the boolean one it was made of
    assert kept(family, "bf16", 2, padded=True) - kept(family, "bf16", 2, padded=False) <= mask


def test_stock_keeps_what_the_notes_say():
    # The meter itself: a stock BERT layer keeps 18.05u in bf16, a stock LLaMA layer 22.05u.
    assert u_per_layer("bert", "bf16", patched=False) == pytest.approx(18.05, abs=0.01)
    assert u_per_layer("llama", "bf16", patched=False) == pytest.approx(22.05, abs=0.01)


# Adapters


def of_adapted(make, itemsize, mode="bf16, fp32 adapters"):
    totals = []
    for layers in (2, 4):
        model = make(replace(QUOTED, layers=layers)).to(DEVICE)
        patch(model)
        with autocast(mode, DEVICE.type):
            totals.append(of_layers(measure_kept(model, batch_for(model, QUOTED))))
    return (totals[1] - totals[0]) / 2 / QUOTED.u(itemsize)


@pytest.mark.long
@pytest.mark.parametrize("family", LORA)
def test_a_layer_with_lora_keeps_the_floor(family):
    assert of_adapted(lambda size: adapted(family, size=size), 2) <= LORA[family]


@pytest.mark.parametrize(("family", "bits"), QUANTIZED)
def test_a_layer_with_qlora_keeps_the_floor(family, bits, tmp_path):
    def make(size):
        build(family, size, torch.bfloat16).save_pretrained(tmp_path / str(size.layers))
        return quantized(tmp_path / str(size.layers), bits, family=family)

    assert of_adapted(make, 4) <= QUANTIZED[family, bits]


@pytest.mark.parametrize(
    ("mode", "dropout", "limit"), [("bf16, fp32 adapters", 0.05, 30.25), ("bf16", 0.0, 11.5)], ids=str
)
def test_a_layer_with_dora_keeps_one_product_a_target(mode, dropout, limit):
    assert of_adapted(lambda size: adapted("llama", mode, dropout, size, use_dora=True), 2, mode) <= limit
