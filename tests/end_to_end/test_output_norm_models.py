"""``norm="output"`` in models: what is reported and refused, and three steps next to stock's."""

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_memsave import MemSaveConfig, PatchError, measure_kept, patch
from support.helpers import assert_same_bits, only_on_cpu
from support.steps import step
from support.zoo import QUOTED, batch_for, build

OUTPUT = MemSaveConfig(norm="output")


def test_a_norm_without_weight_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, elementwise_affine=False))
    with pytest.raises(PatchError, match=r"1 \(LayerNorm\) has no weight .* expects one.* Use norm='recompute'"):
        patch(model, OUTPUT)
    assert type(model[1]) is nn.LayerNorm
    patch(model)


#: The largest relative error of a gradient: measured half of it or less. LLaMA's and T5's statistics are fp32.
SLACK = {
    "output": {torch.float32: 1e-6, torch.float64: 3e-7, torch.bfloat16: 0.04},
    "tempo": {torch.float32: 7e-4, torch.float64: 7e-4, torch.bfloat16: 0.04},
}
#: T5's ReLU has no inverse.
CASES = [
    (family, dtype, config)
    for family in ("bert", "llama", "t5-encoder")
    for dtype in (torch.float32, torch.float64, torch.bfloat16)
    for config in SLACK
    if config == "output" or family != "t5-encoder"
]


@pytest.mark.parametrize(("family", "dtype", "config"), CASES)
def test_a_model_trains_as_stock(device, family, dtype, config):
    """An error is a share of what it may be: of its gradient's size, and rounding of that of all; infinite if NaN."""
    only_on_cpu(device)
    stock, ours = build(family, dtype=dtype), build(family, dtype=dtype)
    patch(ours, {"output": OUTPUT}.get(config, config))
    batch, optimizer = batch_for(stock), torch.optim.SGD(stock.parameters(), 0.1)
    differ, shares = 0, []
    for seed in range(3):
        ours.load_state_dict(stock.state_dict())
        got, expected = step(ours, batch, seed), step(stock, batch, seed)
        assert_same_bits(got["loss"], expected["loss"])
        differ += sum(not torch.equal(got[name], gradient) for name, gradient in expected.items())
        sizes = torch.stack([true.double().norm() for true in expected.values()])
        errors = torch.stack([(got[name].double() - true.double()).norm() for name, true in expected.items()])
        rounding = 10 * torch.finfo(expected["loss"].dtype).eps * sizes.norm()
        shares.append(float((errors / (SLACK[config][dtype] * sizes + rounding)).nan_to_num(nan=torch.inf).max()))
        optimizer.step()
        if (config, dtype) == ("output", torch.float32):
            with torch.no_grad():  # columns come into need: of a γ that is 0, and of a β that grows
                for norm in (m for m in stock.modules() if isinstance(m, (nn.LayerNorm, LlamaRMSNorm))):
                    norm.weight[seed::5], norm.weight[seed + 1 :: 7] = 0.0, 1.0
                    if family == "bert":
                        norm.bias[seed::3] += 2.0
    assert differ, "every gradient has stock's bits: the output was not used"
    assert max(shares) <= 1, shares


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5-encoder"])
def test_a_model_keeps_no_more_than_the_exact_one_and_under_autocast_up_to_a_third_more(device, family):
    for is_autocast in (False, True):
        totals = []
        for config in (None, MemSaveConfig(), OUTPUT):
            model = build(family, QUOTED, dropout=0.0).to(device)
            if config is not None:
                patch(model, config)
            with torch.autocast(model.device.type, torch.bfloat16, enabled=is_autocast):
                totals.append(measure_kept(model, batch_for(model, QUOTED)).total)
        stock, exact, output = totals
        assert exact < output <= 4 / 3 * exact < stock if is_autocast else output <= exact
