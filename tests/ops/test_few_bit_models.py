"""``activation="few_bit"`` in models: bits where nobody wants the output, and the exact op where somebody does."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_memsave import MemSaveConfig, measure_kept, patch
from support.families import Size, batch_for, build
from support.helpers import assert_same_bits, only_on_cpu, random
from support.steps import assert_same, step

SIZE = Size(hidden=64)
#: Of the expression of NewGELU: float64 numbers that autograd keeps for the exact op.
FACTORS = 3 * 8


def chain(trained):
    """Two activations: the linear after the first is trained or not, that after the second the other way."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)]
    model = nn.Sequential(*layers, nn.Linear(8, 2))
    model[2].requires_grad_(trained == 0)
    model[5].requires_grad_(trained == 1)
    return model


def of_chain(model, x):
    leaf = x.clone().requires_grad_()
    model(leaf).square().sum().backward()
    return leaf.grad


@pytest.mark.parametrize("trained", [0, 1])
def test_each_activation_of_a_model_chooses_for_itself(device, trained):
    stock = chain(trained).to(device)
    exact, ours = copy.deepcopy(stock), copy.deepcopy(stock)
    patch(exact)
    patch(ours, MemSaveConfig(activation="few_bit"))
    x = random(64, 8, device=device)
    n = 64 * 16
    freed = measure_kept(exact, x).total - measure_kept(ours, x).total
    assert freed == n * 4 - (n // 2 + n // 1024)  # one of both, in 4 bits and a byte
    for model in (stock, ours):
        of_chain(model, x)
    after, before = (ours[3].weight.grad, stock[3].weight.grad) if trained else (None, None)
    assert_same_bits(after, before)  # of what lies behind the activation that keeps bits
    assert not torch.equal(ours[0].weight.grad, stock[0].weight.grad)


@pytest.mark.parametrize("after", [nn.Dropout(0.3), nn.GELU(), nn.LayerNorm(16)], ids=str)
def test_few_bit_is_exact_where_its_output_is_wanted_in_the_end(device, after):
    only_on_cpu(device)
    found = []
    for config in ({"activation": "few_bit"}, None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), copy.deepcopy(after), nn.Linear(16, 2)).to(device)
        if config is not None:
            patch(model, config)
        found.append(of_chain(model, random(32, 8, device=device)))
    assert_same_bits(*found)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5-gated-encoder"])
def test_a_model_that_is_trained_whole_gets_the_exact_config(device, family):
    only_on_cpu(device)
    exact = build(family, SIZE).to(device)
    ours, stock = copy.deepcopy(exact), copy.deepcopy(exact)
    patch(exact)
    patch(ours, MemSaveConfig(activation="few_bit"))
    batch = batch_for(stock, SIZE)
    factors = measure_kept(exact, batch).total - measure_kept(ours, batch).total
    assert factors == FACTORS * {"gpt2": 2, "t5-gated-encoder": 4}.get(family, 0)
    assert_same(step(ours, batch), step(stock, batch))


@pytest.mark.parametrize("targets, is_wanted", [(["query"], False), (["query", "output.dense"], True)], ids=str)
def test_lora_decides_by_whether_it_reads_the_output(device, targets, is_wanted):
    only_on_cpu(device)

    def make(config):
        torch.manual_seed(0)
        lora = LoraConfig(target_modules=targets, lora_dropout=0.1, init_lora_weights=False)
        model = get_peft_model(build("bert", SIZE), lora).to(device)
        if config is not None:
            patch(model, config)
        return model

    exact, ours, stock = (make(config) for config in (True, {"activation": "few_bit"}, None))
    batch = batch_for(build("bert", SIZE), SIZE)
    freed = measure_kept(exact, batch).total - measure_kept(ours, batch).total
    n = SIZE.u(4) // 4 * 4
    # The first block's activation has no gradient before its first adapter; the other keeps an eighth of its input.
    assert freed == (0 if is_wanted else 2 * (4 * n - n // 2 - -(-n // 1024)))
    if is_wanted:
        assert_same(step(ours, batch), step(stock, batch))


@pytest.mark.parametrize("trained", [True, False])
def test_the_report_counts_what_it_frees(device, trained):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8).requires_grad_(trained)).to(device)
    x = random(64, 8, device=device)
    stock = measure_kept(model, (x.requires_grad_(),)).total
    report = patch(model, MemSaveConfig(activation="few_bit"))
    model(x).sum().backward()
    assert report.step.nbytes_avoided == stock - measure_kept(model, (x,)).total >= 64 * 16 * 3


@pytest.mark.parametrize("storage", [None, "int8"])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_few_bit_keeps_no_more_than_the_exact_op_after_a_norm(device, norm, trained, storage):
    """The norm keeps what the activation's input is promised from."""
    stock = nn.Sequential(nn.Linear(64, 64), norm(64), nn.GELU(), nn.Linear(64, 64)).to(device)
    stock[-1].requires_grad_(trained)
    x, models = random(32, 64, device=device), {}
    for value in ("recompute", "few_bit"):
        models[value] = copy.deepcopy(stock)
        patch(models[value], MemSaveConfig(activation=value, storage=storage))
    exact, chosen = (measure_kept(models[value], (x,)).total for value in models)
    assert chosen <= exact
    if storage is None:
        only_on_cpu(device)
        for model in (stock, models["few_bit"]):
            model(x).square().sum().backward()
        for mine, expected in zip(models["few_bit"].parameters(), stock.parameters(), strict=True):
            assert (mine.grad is None and expected.grad is None) or torch.equal(mine.grad, expected.grad)
