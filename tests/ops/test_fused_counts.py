"""A first step with kernels is counted as the meter counts it: stock is the model's own functions."""

import pytest
from peft import LoraConfig, get_peft_model

from hf_memsave import MemSaveConfig, measure_kept, patch
from support.families import Size, batch_for, build
from support.helpers import only_on_cpu
from support.kernels import interpreted, rounding  # noqa: F401

SIZE = Size(hidden=32, heads=2, layers=2, batch=2, seq=32)


@interpreted
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_kept_and_avoided_are_what_stock_keeps(family, lora, device):
    only_on_cpu(device, "this count of bytes")
    model = build(family, SIZE)
    model = get_peft_model(model, LoraConfig(r=4)).train() if lora else model
    batch = batch_for(model, SIZE)
    stock = measure_kept(model, batch).total
    step = patch(model, MemSaveConfig(backend="triton")).step
    kept = measure_kept(model, batch).total
    assert step.nbytes_kept == pytest.approx(kept, rel=0.02)
    assert step.nbytes_kept + step.nbytes_avoided == pytest.approx(stock, rel=0.02)
