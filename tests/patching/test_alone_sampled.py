"""A sampled layer patched by itself, in a model that is not."""

import copy

import pytest
import torch
from torch import nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertLayer, BertSelfAttention

from hf_memsave import WTACRS, MemSaveConfig, PatchError, measure_kept, patch, unpatch
from hf_memsave.patching.swap import patch_of
from support.alone import EAGER, FLAT, ROWS, WIDTH, Around, N, step
from support.families import build
from support.helpers import assert_same_bits, only_on_cpu, random
from support.steps import assert_same


def sampled(device, make=lambda: nn.Linear(WIDTH, WIDTH), **options):
    torch.manual_seed(0)
    stock = make().to(device)
    ours = copy.deepcopy(stock)
    report = patch(ours, MemSaveConfig(linear=WTACRS(**options)))
    assert "wta_crs" in {site.op for site in report.patched}
    return Around(stock, FLAT).to(device), Around(ours, FLAT).to(device), random(*FLAT, device=device)


def test_a_sampled_linear_alone_keeps_rows_and_is_unbiased(device):
    stock, ours, x = sampled(device, budget=0.3)
    drawn = round(0.3 * ROWS)
    freed = measure_kept(stock, x).total - measure_kept(ours, x).total
    assert freed == 4 * (N - drawn * WIDTH) - 4 * drawn - ROWS  # an index a row, and the tokens' mask
    expected = step(stock, x)
    draws = [step(ours, x) for _ in range(300)]
    assert_same_bits(draws[0]["loss"], expected["loss"])
    assert_same_bits(draws[0]["before.weight"], expected["before.weight"])
    weights = torch.stack([draw["layer.weight"] for draw in draws])
    error = (weights.mean(0) - expected["layer.weight"]).norm()
    noise = (weights.var(0) / len(draws)).sum().sqrt()
    assert 0 < error < 2 * noise < 0.3 * expected["layer.weight"].norm()


def test_a_sampled_linear_alone_is_exact_in_eval_and_after_undo(device):
    only_on_cpu(device)
    stock, ours, x = sampled(device)
    ours.eval()
    assert_same(step(ours, x), step(stock, x))
    ours.train()
    unpatch(ours.layer)
    assert set(ours.layer.__dict__) == set(stock.layer.__dict__)
    assert_same(step(ours, x), step(stock, x))


def test_the_linears_of_a_block_alone_are_sampled(device):
    _, ours, x = sampled(device, lambda: BertLayer(BertConfig(**EAGER, intermediate_size=64)))
    patches = [patch_of(module) for module in ours.modules()]
    assert sum(known is not None and known.op == "wta_crs" for known in patches) == 6
    step(ours, x)


def test_the_products_of_attention_alone_are_sampled(device):
    stock, ours, x = sampled(device, lambda: BertSelfAttention(BertConfig(**EAGER)), attention=True)
    assert not torch.equal(step(ours, x)["layer.query.weight"], step(stock, x)["layer.query.weight"])


@pytest.mark.parametrize("options", [{"cache": "content"}, {"cache": "sample_idx", "samples": 9}], ids=str)
def test_a_cache_by_sample_is_refused_for_a_layer_alone(options):
    layer = nn.Linear(4, 4)
    with pytest.raises(PatchError, match=r"tells samples apart by a model's batch.*Linear.*cache='position'"):
        patch(layer, MemSaveConfig(linear=WTACRS(**options)))
    assert type(layer) is nn.Linear


@pytest.mark.parametrize("options", [{"cache": "content"}, {"cache": "sample_idx", "samples": 8}], ids=str)
def test_a_cache_by_sample_is_refused_for_a_block_alone(options):
    block = build("bert").bert.encoder.layer[0]
    with pytest.raises(PatchError, match="does not see"):
        patch(block, MemSaveConfig(linear=WTACRS(**options)))
