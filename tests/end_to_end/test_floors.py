"""Kept memory per layer of models beyond the quoted ones, next to what their products and attention must keep."""

import copy
import functools
from dataclasses import replace

import pytest
import torch

from hf_memsave import measure_kept, patch
from support.families import QUOTED, Size
from support.helpers import autocasting, halved, only_on_cpu
from support.steps import assert_same, step
from support.zoo import ZOO, build, zoo_batch

#: The fewest u a layer, in this order: inputs of norms; q, k, v; probabilities; attention's output; MLP or experts.
#: An input of a norm is a residual sum or the product that, with an earlier sum, makes it; k and v have half the heads.
FLOOR = {
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
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SMALL = Size(hidden=64, heads=4, layers=3, batch=2, seq=32)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@functools.cache
def kept(name, layers, dtype):
    size = replace(QUOTED, layers=layers)
    model = build(name, size, DTYPES[dtype])
    patch(model)
    return measure_kept(model, zoo_batch(model, size)).total


@pytest.mark.long
@pytest.mark.parametrize(("name", "dtype"), halved(ZOO, DTYPES))
def test_a_layer_keeps_its_floor(name, dtype, device):
    only_on_cpu(device, "a figure")
    found = (kept(name, 6, dtype) - kept(name, 2, dtype)) / 4 / QUOTED.u(DTYPES[dtype].itemsize)
    assert FLOOR[name] <= found <= (1.065 if name in CHAINED else 1.045) * FLOOR[name]


@pytest.mark.parametrize("mode", [*DTYPES, "autocast"])
@pytest.mark.parametrize("name", ZOO)
def test_a_step_has_stocks_bits(name, mode, device):
    only_on_cpu(device)
    stock = build(name, SMALL, DTYPES.get(mode, torch.float32))
    ours = copy.deepcopy(stock)
    patch(ours)
    steps = []
    for model in (ours, stock):
        with autocasting(device, torch.bfloat16 if mode == "autocast" else None):
            steps.append(step(model, zoo_batch(model, SMALL, padded=True)))
    assert_same(*steps)
