"""Kept memory per layer at the size in which it is quoted: every live storage, the difference of two depths."""

import contextlib
from dataclasses import replace

import pytest
import torch

from hf_memsave import measure_kept, patch
from support.families import FAMILIES, QUOTED, batch_for, build

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="figures are those of CPU kernels")

#: u per layer: at most this, with weights and activations in one dtype.
LIMIT = {
    "bert": 10.3, "roberta": 10.3, "gpt2": 10.3, "t5-encoder": 10.3, "t5-decoder": 15.4, "t5-gated-encoder": 11.8,
    "llama": 10.8, "mistral": 10.8, "phi3": 10.8, "phi": 9.3,
    "opt": 12.3,  # of which 2 are the masks of its two functional dropouts
}  # fmt: skip
#: The floor under bf16 autocast with fp32 weights, in bf16 u: the residual stream's two tensors count twice.
AUTOCAST_FLOOR = {
    "bert": 12, "roberta": 12, "gpt2": 12, "t5-encoder": 12, "t5-decoder": 18, "t5-gated-encoder": 13.5,
    "llama": 12.5, "mistral": 12.5, "phi3": 12.5, "phi": 10, "opt": 14,
}  # fmt: skip
MODES = {"fp32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.float32}


def kept(family, mode, layers, padded, patched=True):
    size = replace(QUOTED, layers=layers)
    model = build(family, size, MODES[mode])
    if patched:
        patch(model)
    with torch.autocast("cpu", torch.bfloat16) if mode == "autocast" else contextlib.nullcontext():
        return measure_kept(model, batch_for(model, size, padded)).total


def u_per_layer(family, mode, padded=False, patched=True):
    itemsize = 4 if mode == "fp32" else 2
    return (kept(family, mode, 2, padded, patched) - kept(family, mode, 1, padded, patched)) / QUOTED.u(itemsize)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_keeps_its_floor(family, mode, padded):
    assert u_per_layer(family, mode, padded) <= LIMIT[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_keeps_its_floor_under_autocast_and_no_cast_of_a_weight(family):
    assert u_per_layer(family, "autocast") <= 1.03 * AUTOCAST_FLOOR[family]


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
