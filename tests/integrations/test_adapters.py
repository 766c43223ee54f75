"""Adapters beyond plain LoRA on all linears: fewer targets, DoRA, quantized bases, PEFT's other methods."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_memsave import measure_kept, patch
from hf_memsave.patching.swap import is_patched
from support.helpers import of_layers, on_cpu_alone, thinned
from support.lora import RANK, SIZE, adapted, assert_trains_like, autocast, outputs, pair, quantized
from support.zoo import QUOTED, batch_for, build

#: Between them, what is kept after every second or third block evens out.
DEPTHS = 2, 8
U = QUOTED.u(2)
on_cpu = on_cpu_alone()


def per_layer(make, mode="bf16, fp32 adapters", patched=True):
    """What a layer keeps, on average: the difference of two depths."""
    kept = []
    for layers in DEPTHS:
        model = make(replace(QUOTED, layers=layers))
        if patched:
            patch(model, {"dropout": "seed"})
        with autocast(mode):
            kept.append(of_layers(measure_kept(model, batch_for(model, QUOTED))))
    return (kept[1] - kept[0]) / (DEPTHS[1] - DEPTHS[0])


@pytest.mark.parametrize(
    ("mode", "floor"), [("bf16, fp32 adapters", 10.72), ("bf16", 10.66), ("fp32", 2 * 10.63), ("autocast", 11.2)]
)
def test_lora_on_q_and_v_keeps_the_floor(mode, floor):

    def make(size):
        config = LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"], lora_dropout=0.05)
        base = build("llama", size, torch.float32 if mode in ("fp32", "autocast") else torch.bfloat16)
        return get_peft_model(base, config, autocast_adapter_dtype=mode != "bf16").train()

    assert per_layer(make, mode) <= floor * U


# DoRA: the floor; with dropout, one base result a target, which the magnitude's gradient is a product with.


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "dropout", "floor"), [("bf16", 0.0, 12.83), ("bf16", 0.05, 20.46), ("bf16, fp32 adapters", 0.05, 30.23)]
)
def test_dora_keeps_the_floor_and_one_result_a_target(mode, dropout, floor):
    assert per_layer(lambda size: adapted("llama", mode, dropout, size, use_dora=True), mode) <= floor * U


DORA = ["bert", "gpt2", "llama"], ["bf16, fp32 adapters", "bf16", "fp32", "autocast"], [0.0, 0.05]


@pytest.mark.parametrize(("family", "mode", "dropout"), thinned(4, *DORA))  # with biases, transposed weights, without
def test_dora_trains_like_stock(family, mode, dropout):
    stock, ours = pair(adapted(family, mode, dropout, use_dora=True))
    assert_trains_like(ours, stock, mode, steps=3)


#: Family -> what a layer keeps in 4 or 8 bits as loaded; and prepared by PEFT, which makes the residual stream fp32,
#: and with it all that 8-bit linears take. 4-bit ones compute in bf16.
QUANTIZED = {"bert": (10.6, 12.66, 21.15), "gpt2": (10.44, 12.42, 20.9), "llama": (11.14, 13.05, 22.05)}


@pytest.mark.parametrize(("family", "bits", "prepared"), thinned(3, QUANTIZED, [4, 8], [True, False]))
def test_a_quantized_base_keeps_the_floor(family, bits, prepared, saved):
    floor = QUANTIZED[family][bits // 4 if prepared else 0]
    assert per_layer(lambda size: quantized(saved(size, family), bits, prepared, family)) <= floor * U


@pytest.mark.long
def test_the_meter_counts_what_8bit_linears_hide_and_dora_on_nf4_keeps_no_dequantized_weight(saved):
    of = {bits: per_layer(lambda size, bits=bits: quantized(saved(size), bits), patched=False) for bits in (4, 8)}
    hidden = 2 + 2.75  # each norm's output and the gated product; o_proj's input is kept by attention anyway
    assert of[8] - of[4] == pytest.approx(hidden * QUOTED.u(4), rel=0.01)
    assert per_layer(lambda size: quantized(saved(size), 4, use_dora=True)) <= 33.4 * U


@pytest.mark.parametrize(("bits", "dora"), [(4, False), (4, True), (8, False)])  # stock cannot train DoRA on 8 bits
def test_a_quantized_base_trains_like_stock(bits, dora, saved):
    stock = quantized(saved(SIZE), bits, use_dora=dora)
    ours = quantized(saved(SIZE), bits, use_dora=dora)
    report = patch(ours)
    linears = [m for m in ours.modules() if type(m).__module__.startswith("bitsandbytes")]
    assert linears and all(is_patched(m) == (bits == 8) for m in linears)  # only its node hides an input
    assert_trains_like(ours, stock, steps=3)
    kept = {"kept": ours, "stock": stock}
    kept = {name: measure_kept(model, batch_for(model, SIZE)).total for name, model in kept.items()}
    assert (report.step.nbytes_kept, report.step.nbytes_stock) == pytest.approx((kept["kept"], kept["stock"]), rel=0.02)


# Ways of training that test_peft_methods.py has not.


def test_lora_fa_trains_like_stock_and_keeps_no_input_of_lora_a():
    from peft.optimizers import create_lorafa_optimizer

    stock, ours = pair(adapted("llama", "fp32"))
    finals = []
    for model in (ours, stock):
        torch.manual_seed(3)
        optimizer = create_lorafa_optimizer(model, r=RANK, lora_alpha=16, lr=1e-2)
        for step in range(3):
            model(**batch_for(model, SIZE, seed=step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        finals.append({n: p for n, p in model.named_parameters() if "lora_" in n})
    assert all(torch.equal(finals[0][n], p) for n, p in finals[1].items())
    assert measure_kept(ours, batch_for(ours, SIZE)).total < 0.7 * measure_kept(stock, batch_for(stock, SIZE)).total


def test_a_batch_of_several_adapters_is_stocks():
    stock = adapted("llama")
    stock.add_adapter("second", LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    stock, ours = pair(stock.eval())
    batch = batch_for(ours, SIZE)
    names, results = ["second", "__base__"], []
    for model in (ours, stock):
        embeddings = model.get_input_embeddings().weight.requires_grad_()
        output = model(**batch, adapter_names=names)
        results.append((output.loss.detach(), *torch.autograd.grad(output.loss, embeddings)))
    assert all(map(torch.equal, *results))
    assert not torch.equal(outputs(ours), ours(**batch, adapter_names=names).logits)
