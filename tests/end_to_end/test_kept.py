"""Kept memory per layer at the size in which it is quoted: every live storage, the difference of two depths."""

import functools
from dataclasses import replace

import pytest
import torch

from hf_memsave import measure_kept, patch
from support import zoo
from support.helpers import BYTES, MATRIX, halved, on_cpu_alone, only_on_cpu
from support.zoo import FAMILIES, MODES, MORE, QUOTED, ZOO, batch_for, build

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
claimed = on_cpu_alone(BYTES)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

#: In this order: inputs of norms; q, k, v; probabilities; attention's output; MLP or experts. An input of a norm is a
#: residual sum or the product that, with an earlier sum, makes it; k and v have half the heads.
FLOOR = zoo.FLOOR | {
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


@functools.cache
def kept(family, mode, layers, padded=False, patched=True, batch=QUOTED.batch, dropout=None):
    """In bytes; masks beside tensors of 16 bits, of which a bit an element is more than 3%, as states."""
    size = replace(QUOTED, layers=layers, batch=batch)
    model = build(family, size, MODES[mode]).to(DEVICE)
    if patched:
        patch(model, {"dropout": dropout or ("auto" if mode == "fp32" else "seed")})
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
@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(family, marks=MATRIX) for family in MORE)])
def test_a_layer_keeps_its_floor_and_no_cast_of_a_weight_under_autocast(family):
    """With fp32 weights, every second layer keeps an fp32 sum where the others keep a bf16 product."""
    assert u_per_layer(family, "autocast", last=6) <= SLACK[family] * (FLOOR[family] + 0.5)
    last = 8 if family == "t5-decoder" else 6
    one, of_batch = (kept(family, "autocast", last, batch=b) - kept(family, "autocast", 4, batch=b) for b in (1, 4))
    whatever_the_batch = (4 * one - of_batch) / 3
    weights = (last - 4) * 12 * QUOTED.hidden**2 * 2
    assert whatever_the_batch < 0.03 * weights


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_adds_at_most_one_mask_per_forward(family):
    # A T5's encoder, decoder and cross-attention have one each, with the bias of every head.
    masks = 3 * QUOTED.heads if family.startswith("t5") else 1
    mask = masks * QUOTED.batch * QUOTED.seq * QUOTED.seq * (2 + 1)  # in bf16, and the boolean one it was made of
    assert kept(family, "bf16", 2, padded=True) - kept(family, "bf16", 2, padded=False) <= mask


def test_masks_beside_tensors_of_16_bits_take_a_bit_an_element_on_cpu():
    only_on_cpu(DEVICE, "that one bit")
    auto, seed = (
        kept("bert", "bf16", 4, dropout=how) - kept("bert", "bf16", 2, dropout=how) for how in ("auto", "seed")
    )
    assert auto - seed == 2 * 2 * (QUOTED.u(2) / 16 - 5056)  # of two layers, of two dropouts each


def test_stock_keeps_what_the_notes_say():
    # The meter itself: a stock BERT layer keeps 18.05u in bf16, a stock LLaMA layer 22.05u.
    assert u_per_layer("bert", "bf16", patched=False) == pytest.approx(18.05, abs=0.01)
    assert u_per_layer("llama", "bf16", patched=False) == pytest.approx(22.05, abs=0.01)
