"""``norm="output"`` in models: what is reported and refused, and three steps next to stock's."""

import copy

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_memsave import MemSaveConfig, PatchError, measure_kept, patch
from hf_memsave.ops.approximate import inverted, output_norm
from hf_memsave.ops.approximate.inverse import slope
from support.families import QUOTED, batch_for, build
from support.helpers import assert_same_bits, only_on_cpu, random
from support.slopes import PLANTED
from support.steps import step

OUTPUT = MemSaveConfig(norm="output")


def norms(model):
    return [module for module in model.modules() if isinstance(module, (nn.LayerNorm, LlamaRMSNorm))]


def test_the_report_names_the_norms_whatever_their_columns():
    for keeps in (0, 5, 32):
        model = build("llama")
        for module in norms(model):
            module.weight.data[:keeps] = 0
        sites = [site for site in patch(model, OUTPUT).sites if site.op == "output_norm"]
        assert [site.reason for site in sites] == [""] * 5


def test_a_group_norm_is_remade_exactly():
    stock = nn.Sequential(nn.Linear(8, 8), nn.GroupNorm(2, 8), nn.Linear(8, 8))
    ours = copy.deepcopy(stock)
    assert not [site for site in patch(ours, OUTPUT).sites if site.op == "output_norm"]
    x = random(5, 8)
    for model in (ours, stock):
        model(x).square().sum().backward()
    for mine, theirs in zip(ours.parameters(), stock.parameters(), strict=True):
        assert_same_bits(mine.grad, theirs.grad)


def test_a_norm_without_weight_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, elementwise_affine=False))
    with pytest.raises(PatchError, match=r"1 \(LayerNorm\) has no weight .* expects one.* Use norm='recompute'"):
        patch(model, OUTPUT)
    assert type(model[1]) is nn.LayerNorm
    patch(model)


def wrong_norm(monkeypatch):
    """The slope of each norm is too large."""
    of_class = output_norm._of_class

    def too_large(cls):
        def forward(*args, **kwargs):
            found = of_class(cls)(*args, **kwargs)
            return found._replace(rstd=PLANTED * found.rstd)

        return forward

    monkeypatch.setattr(output_norm, "_of_class", too_large)


def wrong_activation(monkeypatch):
    """The slope of each activation is too large."""
    monkeypatch.setattr(inverted, "slope", lambda *args: PLANTED * slope(*args))


#: The largest relative error of a gradient: measured half of it or less. LLaMA's and T5's statistics are fp32.
SLACK = {
    "output": {torch.float32: 1e-6, torch.float64: 3e-7, torch.bfloat16: 0.04},
    "tempo": {torch.float32: 7e-4, torch.float64: 7e-4, torch.bfloat16: 0.04},
}
CONFIGS = {"output": OUTPUT, "tempo": "tempo"}


def worst_share(got, expected, slack):
    """The largest error of a gradient, of what it may be: of its own size, and rounding of that of all together.

    Infinite if one is NaN.
    """
    total = torch.stack([gradient.double().norm() for gradient in expected.values()]).norm()
    eps = 10 * torch.finfo(expected["loss"].dtype).eps
    shares = [
        (got[name].double() - true.double()).norm() / (slack * true.double().norm() + eps * total)
        for name, true in expected.items()
    ]
    return float(torch.stack(shares).nan_to_num(nan=float("inf")).max())


@pytest.mark.parametrize(
    ("config", "plant"),
    [("output", None), ("tempo", None), ("output", wrong_norm), ("tempo", wrong_norm), ("tempo", wrong_activation)],
    ids=lambda value: getattr(value, "__name__", str(value or "right")),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["bert", "llama", "t5-encoder"])
def test_a_model_trains_as_stock(device, family, dtype, config, plant, monkeypatch):
    only_on_cpu(device)
    if family == "t5-encoder" and config == "tempo":
        pytest.skip("does not apply: its ReLU has no inverse")
    if plant is not None and dtype == torch.bfloat16:
        pytest.skip("does not apply: a hundredth is little next to its rounding")
    if plant is not None:
        plant(monkeypatch)
    stock, ours = build(family, dtype=dtype), build(family, dtype=dtype)
    patch(ours, CONFIGS[config])
    batch, optimizer = batch_for(stock), torch.optim.SGD(stock.parameters(), 0.1)
    differ, shares = 0, []
    for seed in range(3):
        ours.load_state_dict(stock.state_dict())
        got, expected = step(ours, batch, seed), step(stock, batch, seed)
        assert_same_bits(got["loss"], expected["loss"])
        differ += sum(not torch.equal(got[name], gradient) for name, gradient in expected.items())
        shares.append(worst_share(got, expected, SLACK[config][dtype]))
        optimizer.step()
    assert differ, "every gradient has stock's bits: the output was not used"
    assert (max(shares) <= 1) == (plant is None), shares


def from_y_alone(monkeypatch):
    """No column is told from its input."""
    monkeypatch.setattr(output_norm, "_normed", lambda z, weight, bias: z / weight)


@pytest.mark.parametrize("plant", [None, from_y_alone], ids=["right", "from y alone"])
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpointed", "reentrant"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_model_trains_as_stock_while_columns_come_into_need(device, family, checkpointing, plant, monkeypatch):
    """Set to 0, moved by an optimizer, and of a β that grows."""
    only_on_cpu(device)
    stock, ours = build(family), build(family)
    patch(ours, OUTPUT)
    if plant is not None:
        plant(monkeypatch)
    for model in (stock, ours) if checkpointing is not None else ():
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    batch, optimizer = batch_for(stock), torch.optim.SGD(stock.parameters(), 0.1)
    shares, numbers = [], []
    for seed in range(4):
        ours.load_state_dict(stock.state_dict())
        got, expected = step(ours, batch, seed), step(stock, batch, seed)
        assert_same_bits(got["loss"], expected["loss"])
        shares.append(worst_share(got, expected, SLACK["output"][torch.float32]))
        numbers.append([int(output_norm.is_well(n.weight, getattr(n, "bias", None)).sum()) for n in norms(ours)])
        optimizer.step()
        with torch.no_grad():
            for norm in norms(stock):
                norm.weight[seed::5] = 0.0
                norm.weight[seed + 1 :: 7] = 1.0
                if family == "bert":
                    norm.bias[seed::3] += 2.0
    assert len(set(map(tuple, numbers))) > 2
    assert (max(shares) <= 1) == (plant is None), shares


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
