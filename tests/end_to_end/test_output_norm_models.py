"""``norm="output"`` in models: what is reported and refused, and three steps next to stock's."""

import copy
import re

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_memsave import MemSaveConfig, PatchError, measure_kept, patch
from hf_memsave.ops import inverted, output_norm
from hf_memsave.ops.inverse import slope
from support.families import QUOTED, batch_for, build
from support.helpers import assert_same_bits, only_on_cpu, random
from support.slopes import PLANTED
from support.steps import step

OUTPUT = MemSaveConfig(norm="output")


def llama_with(keeps):
    model = build("llama")
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.weight.data[:keeps] = 0
    return model


@pytest.mark.parametrize(("keeps", "note"), [(0, ""), (4, "keeps the input of 4 of 32"), (5, "recomputed .* 5 of 32")])
def test_the_report_says_which_columns_keep_their_input(keeps, note):
    report = patch(llama_with(keeps), OUTPUT)
    reasons = [site.reason for site in report.sites if site.op == "output_norm"]
    assert len(reasons) == 5
    assert all(re.match(note, reason) and bool(reason) == bool(note) for reason in reasons)
    assert not note or re.search(note, str(report))
    assert not [site for site in patch(llama_with(keeps)).sites if site.op not in ("model", "block")]


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
            y, rstd, mean = of_class(cls)(*args, **kwargs)
            return output_norm.Normed(y, PLANTED * rstd, mean)

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
    """The largest error of a gradient, of what it may be: of its own size, and rounding of that of all together."""
    total = torch.stack([gradient.double().norm() for gradient in expected.values()]).norm()
    eps = 10 * torch.finfo(expected["loss"].dtype).eps
    return max(
        float((got[name].double() - true.double()).norm() / (slack * true.double().norm() + eps * total))
        for name, true in expected.items()
    )


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
        pytest.skip("its ReLU has no inverse")
    if plant is not None and dtype == torch.bfloat16:
        pytest.skip("a hundredth is little next to its rounding")
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


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_model_keeps_no_more_than_the_exact_one(device, family):
    models = [build(family, QUOTED, dropout=0.0).to(device) for _ in range(2)]
    totals = []
    for model, config in zip(models, (MemSaveConfig(), OUTPUT), strict=True):
        patch(model, config)
        totals.append(measure_kept(model, batch_for(model, QUOTED)).total)
    assert totals[1] <= totals[0]
