"""Experts, of three-dimensional parameters: their first products run again where linears' do, to stock's bits."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode

from hf_memsave import MemSaveConfig, measure_kept, patch
from hf_memsave.arch.versions import enable_checkpointing
from support.attacks import assert_alike
from support.steps import assert_same, backward, step
from support.zoo import LOW, MODES, Size, batch_for, build, with_batch

SIZE, LARGER = Size(), Size(hidden=64, heads=4, batch=2, seq=64)
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
HOW = ("eager", "batched_mm", "grouped_mm")


def experts(family, how, size=SIZE, dtype=torch.float32):
    model = build(family, size, dtype)
    model.set_experts_implementation(how)
    return model


def at(model, rung):
    return patch(model, MemSaveConfig(checkpoint=rung), replace=True)


def adapted(model, *parameters):
    torch.manual_seed(0)
    of_experts = [f"experts.{name}" for name in parameters]
    config = LoraConfig(r=2, target_modules=["o_proj"], target_parameters=of_experts, init_lora_weights=False)
    return get_peft_model(model, config).train()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_stocks_to_the_bit(family, how, mode):
    model, batch = with_batch(experts(family, how, dtype=MODES[mode]), SIZE, padded=True)
    stock = step(model, batch, low=LOW[mode])
    at(model, "gate")
    for _ in range(2):
        assert_same(step(model, batch, low=LOW[mode]), stock)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", HOW)
def test_a_step_with_adapters_of_experts_is_stocks(how, mode):
    """Their products are kept: PEFT writes to what it adds them to at every forward."""
    model = adapted(experts("mixtral", how, dtype=MODES[mode]), "gate_up_proj", "down_proj")
    batch = batch_for(model, SIZE)
    stock, kept = step(model, batch, low=LOW[mode]), []
    for rung in ("up", "gate"):
        at(model, rung)
        for _ in range(2):
            assert_same(step(model, batch, low=LOW[mode]), stock)
        kept.append(measure_kept(model, batch).total)
    assert kept[1] <= kept[0]


@pytest.mark.parametrize("how", HOW)
def test_a_layer_does_not_keep_gate_and_up_of_two_experts_a_token(how):
    """4u of Mixtral's 13u."""

    def kept(rung, layers):
        model = experts("mixtral", how, replace(LARGER, layers=layers))
        at(model, rung)
        return measure_kept(model, batch_for(model, LARGER)).total

    of_qkv, of_up, of_gate = ((kept(rung, 3) - kept(rung, 1)) / 2 / LARGER.u(4) for rung in ("qkv", "up", "gate"))
    assert of_qkv == of_up
    freed = of_up - of_gate  # as a batch takes rows of weights, without the copy that is kept where none runs again
    assert 3.9 < freed < 4.1 if how != "batched_mm" else freed > 4


def test_it_costs_the_first_product_of_the_experts_and_no_more():
    flops = {}
    for rung in ("qkv", "gate"):
        model = experts("mixtral", "eager")
        at(model, rung)
        batch = batch_for(model, SIZE)
        with FlopCounterMode(display=False) as counter:
            model(**batch).loss.backward()
        flops[rung] = counter.get_total_flops()
    tokens, chosen, width = SIZE.batch * SIZE.seq, 2, SIZE.hidden
    assert flops["gate"] - flops["qkv"] == SIZE.layers * chosen * 2 * tokens * width * 2 * width


def test_the_report_names_the_experts_and_those_whose_products_cannot_run_again():
    for family, how, reason in (
        ("mixtral", "grouped_mm", ""), ("gpt_oss", "eager", ""),
        ("gpt_oss", "grouped_mm", "its grouped_mm adds a bias in place"),
        ("mixtral", "sonicmoe", "or is a kernel of its own"),
    ):  # fmt: skip
        model = experts(family, "eager")
        model.config._experts_implementation = how
        report = at(model, "gate")
        sites = [site for site in report.sites if site.op == "run_again" and site.cls.endswith("Experts")]
        assert len(sites) == SIZE.layers
        for site in sites:
            assert site.status == ("skipped" if reason else "patched") and reason in site.reason
        assert not [site for site in at(model, "up").sites if site.cls.endswith("Experts")]


@pytest.mark.parametrize("how", HOW)
def test_a_weight_of_experts_that_is_written_to_before_backward_raises(how):
    model = experts("mixtral", how)
    at(model, "gate")
    loss = model(**batch_for(model, SIZE)).loss
    with torch.no_grad():
        model.model.layers[0].mlp.experts.gate_up_proj.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_copy_and_adapters_that_come_later_run_again_and_undo_leaves_nothing():
    stock, batch = with_batch(experts("mixtral", "grouped_mm"), SIZE)
    before = measure_kept(stock, batch).total
    model = copy.deepcopy(stock)
    report = at(model, "gate")
    kept = measure_kept(model, batch).total
    assert measure_kept(copy.deepcopy(model), batch).total == kept
    report.undo()
    assert measure_kept(model, batch).total == before
    at(model, "gate")
    assert_same(step(adapted(model, "gate_up_proj"), batch), step(adapted(stock, "gate_up_proj"), batch))


def test_other_parameters_of_three_dimensions_are_no_experts():
    """A convolution by the name of a linear, and queries that are learned."""
    model = experts("mixtral", "eager")
    mlp = model.model.layers[0].mlp
    mlp.query, mlp.up_proj = torch.nn.Parameter(torch.zeros(1, 2, 3)), torch.nn.Conv1d(2, 2, 1)
    found = {site.name for site in at(model, "gate").sites if site.op == "run_again" and "mlp" in site.name}
    assert found == {f"model.layers.{layer}.mlp.experts" for layer in range(SIZE.layers)}


@pytest.mark.parametrize("how", HOW)
def test_adapted_experts_are_differentiated_after_other_forwards_and_checkpointed(how):
    """PEFT writes to what an adapter of parameters is added to, at every forward."""

    def run(model, is_checkpointed):
        if is_checkpointed:
            enable_checkpointing(model)
        losses = [model(**batch_for(model, SIZE)).loss for _ in range(1 if is_checkpointed else 2)]
        return backward(model, sum(losses))

    for is_checkpointed in (False, True):
        make = lambda: adapted(experts("mixtral", how), "gate_up_proj")  # noqa: E731
        assert_alike(make, partial(run, is_checkpointed=is_checkpointed), {"checkpoint": "gate"})
