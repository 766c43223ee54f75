"""Batches of 3 x 29 tokens, models of width 24: no tensor is a whole number of a code's blocks."""

import pytest
import torch

from hf_memsave import WTACRS, MemSaveConfig, patch
from support.families import Size, batch_for, build
from support.helpers import assert_same_bits
from support.steps import step

ODD = Size(hidden=24, heads=3, layers=2, batch=3, seq=29)
EXACT = {
    "exact": MemSaveConfig(),
    "mask": MemSaveConfig(dropout="mask"),
    "block": MemSaveConfig(checkpoint="block"),
    "offload": MemSaveConfig(offload=True),
}
#: Setting -> the largest relative error of the gradients: twice what is measured, or more.
APPROXIMATE = {
    "invert": (MemSaveConfig(activation="invert"), 0.02),
    "precision bit": (MemSaveConfig(activation="precision_bit"), 0.02),
    "few bits": (MemSaveConfig(activation="few_bit"), 0.02),
    "output": (MemSaveConfig(norm="output"), 0.02),
    "int8": (MemSaveConfig(storage="int8"), 0.04),
    "int4": (MemSaveConfig(storage="int4"), 0.3),
    "rows": (MemSaveConfig(linear=WTACRS()), 3.0),
    "rows in int8": (MemSaveConfig(linear=WTACRS(), storage="int8"), 3.0),
}
FAMILIES = ("bert", "gpt2", "llama", "t5-decoder")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def of(family, dtype, device, config=None):
    model = build(family, ODD, dtype).to(device)
    if config is not None:
        patch(model, config)
    return [step(model, batch_for(model, ODD)) for _ in range(3)][-1]


@dtypes
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("family", FAMILIES)
def test_exact_settings_have_stocks_bits(device, family, name, dtype):
    got, stock = of(family, dtype, device, EXACT[name]), of(family, dtype, device)
    assert got.keys() == stock.keys()
    for key in stock:
        assert_same_bits(got[key], stock[key])


@dtypes
@pytest.mark.parametrize("name", APPROXIMATE)
@pytest.mark.parametrize("family", FAMILIES)
def test_approximate_settings_run_and_are_near(device, family, name, dtype):
    config, limit = APPROXIMATE[name]
    got, stock = of(family, dtype, device, config), of(family, dtype, device)
    far = sum(float((got[key].double() - stock[key].double()).square().sum()) for key in stock if key != "loss")
    size = sum(float(stock[key].double().square().sum()) for key in stock if key != "loss")
    assert (far / size) ** 0.5 < limit
