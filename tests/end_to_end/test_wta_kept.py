"""What sampled linears keep: never more than exact ones, but for indices, scales and masks; less where it can be."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_memsave import WTACRS, MemSaveConfig, measure_kept, patch
from hf_memsave.patching.sampled_layers import sampler_of
from support.families import FAMILIES, Size, batch_for, build
from support.helpers import only_on_cpu

SIZE = Size(hidden=64, heads=4, layers=2, batch=2, seq=32)
TOKENS = SIZE.batch * SIZE.seq

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")


def make(family, lora, device, size=SIZE):
    model = build(family, size).to(device)
    if lora:
        config = LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.05, init_lora_weights=False)
        model = get_peft_model(model, config).train()
    return model


def kept(model, linear, size=SIZE, steps=0, padded=False, **options):
    """Bytes kept, and the rows drawn meanwhile."""
    patch(model, MemSaveConfig(linear=linear, **options), replace=True)
    batch = batch_for(model, size, padded)
    for _ in range(steps):
        model(**batch).loss.backward()
    if linear is None:
        return measure_kept(model, batch).total, 0
    sampler, rows = sampler_of(model), []
    draw = sampler.draw

    def counted(*args):
        found = draw(*args)
        rows.append(0 if found is None else len(found.index))
        return found

    sampler.draw = counted
    total = measure_kept(model, batch).total
    del sampler.draw
    return total, sum(rows)


def mask_bytes(steps):
    """Of a stack's, an encoder's and a decoder's tokens: which are real and, with a profile, where they stand."""
    return 3 * (TOKENS * (1 + 16 * bool(steps)) + 8 * SIZE.batch)


@pytest.mark.parametrize("steps", [0, 1], ids=["first step", "later step"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_never_keeps_more_than_its_indices(device, family, lora, steps):
    only_on_cpu(device)
    model = make(family, lora, device)
    exact = kept(model, None, steps=steps)[0]
    model.zero_grad()
    sampled, rows = kept(model, WTACRS(), steps=steps)
    assert rows > 0, "nothing was sampled"
    assert sampled <= exact + 8 * rows + mask_bytes(steps)


@pytest.mark.parametrize("options", [{"norm": "stock"}, {"activation": "stock"}, {"dropout": "mask"}], ids=str)
@pytest.mark.parametrize("family", ["bert", "llama", "t5-decoder"])
def test_nor_beside_stock_norms_and_activations(device, family, options):
    only_on_cpu(device)
    model = make(family, False, device)
    exact = kept(model, None, **options)[0]
    sampled, rows = kept(model, WTACRS(), **options)
    assert sampled <= exact + 8 * rows + mask_bytes(0)
    if "norm" in options or ("activation" in options and family == "bert"):  # T5's ReLU keeps y, LLaMA's product is had
        assert sampled < 0.95 * exact, "what nobody else keeps falls to the drawn rows"


@pytest.mark.parametrize("budget", [0.1, 0.3])
@pytest.mark.parametrize(("family", "mlps"), [("opt", 2), ("t5-encoder", 4)])
def test_the_input_of_a_down_projection_falls_to_the_budget_and_a_bit_an_element(device, family, mlps, budget):
    only_on_cpu(device)
    model = make(family, False, device)
    exact = kept(model, None)[0]
    sampled, rows = kept(model, WTACRS(budget=budget))
    of_mlp = TOKENS * 4 * SIZE.hidden * 4
    expected = mlps * of_mlp * (max(round(budget * TOKENS), 10) / TOKENS + 1 / 32)
    assert mlps * of_mlp - (exact - sampled) <= expected + 8 * rows + mask_bytes(0)
    assert mlps * of_mlp - (exact - sampled) >= 0.95 * expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("budget", [0.9, 0.95, 0.99])
def test_a_budget_of_nearly_all_keeps_no_more_than_all(device, budget, dtype):
    only_on_cpu(device)
    model = make("opt", False, device).to(dtype)
    exact = kept(model, None)[0]
    sampled, rows = kept(model, WTACRS(budget=budget))
    assert sampled <= exact + 8 * rows + mask_bytes(0)
    assert bool(rows) == (budget < 0.95), "drawn up to 15/16, which .95 of 64 tokens exceeds"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_too(device, dtype):
    only_on_cpu(device)
    model = make("opt", False, device).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        exact = kept(model, None)[0]
        sampled, rows = kept(model, WTACRS())
    assert sampled < exact and rows > 0
