"""Linears that run again are known by their weights: whatever a tool does to model and weights, classes stay."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.ao.quantization import quantize_dynamic

from hf_memsave import WTACRS, MemSaveConfig, measure_kept, patch, unpatch
from hf_memsave.errors import PatchError
from support.families import Size, batch_for, build
from support.helpers import assert_same_bits

SIZE = Size()
GATE = MemSaveConfig(checkpoint="gate")
BATCH = batch_for(build("llama", SIZE), SIZE)


def step(model):
    torch.manual_seed(0)
    model.zero_grad()
    loss = model(**BATCH).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_same_steps(ours, stock):
    assert len(ours) == len(stock) > 5
    for a, b in zip(ours, stock, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("rung", ["o_proj", "qkv", "up", "gate"])
def test_no_class_of_a_linear_changes(family, rung):
    model = build(family, SIZE)
    before = {name: type(m) for name, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D")}
    report = patch(model, MemSaveConfig(checkpoint=rung))
    assert {site.op for site in report.patched} == {"model", "block", "run_again"}
    assert {name: type(m) for name, m in model.named_modules() if name in before} == before


def test_tools_that_ask_for_the_class_find_every_linear():
    model = build("bert", SIZE)
    linears = sum(type(m) is nn.Linear for m in model.modules())
    patch(model, GATE)
    converted = quantize_dynamic(model.eval(), {nn.Linear})
    assert sum(type(m) is torch.ao.nn.quantized.dynamic.Linear for m in converted.modules()) == linears > 10


def _assigned(model):
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    return model


def _plain_attributes(model):
    """As FSDP1 and replicas of DataParallel have them."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__dict__["weight"] = module._parameters.pop("weight")
    return model


CHANGES = {
    "nothing": lambda model: model,
    "a copy": copy.deepcopy,
    "a pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "weights assigned": _assigned,
    "weights moved": lambda model: model.double().float(),
    "weights that are no parameters": _plain_attributes,
    "patched again": lambda model: (patch(model, GATE), model)[1],
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_kept_stays_what_it_was(change):
    model = build("llama", SIZE)
    kept = {}
    for name, config in (("floor", True), ("gate", GATE)):
        patch(model, config, replace=True)
        kept[name] = measure_kept(model, BATCH).total
    assert kept["gate"] < 0.6 * kept["floor"]
    changed = CHANGES[change](model)
    assert measure_kept(changed, BATCH).total == kept["gate"]


def test_adapters_added_later_are_around_linears_that_run_again():
    kept, steps = [], []
    for config in (None, True, GATE):
        model = build("llama", SIZE)
        if config is not None:
            patch(model, config)
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "gate_proj"], lora_dropout=0.1))
        kept.append(measure_kept(model, BATCH).total)
        steps.append(step(model))
    assert_same_steps(steps[2], steps[0])
    assert kept[2] < 0.7 * kept[1]


def test_undone_nothing_runs_again():
    model = build("llama", SIZE)
    marks = [dict(vars(m)).keys() for m in model.modules()]
    patch(model, GATE)
    unpatch(model)
    assert [dict(vars(m)).keys() for m in model.modules()] == marks


def test_a_hook_on_the_linear_is_not_run_again():
    model, calls = build("llama", SIZE), []
    linear = model.model.layers[0].mlp.gate_proj
    linear.register_forward_hook(lambda module, args, y: calls.append(1) or 2 * y)
    stock = step(model)
    patch(model, GATE)
    assert_same_steps(step(model), stock)
    assert len(calls) == 2


def test_what_cannot_run_again_is_named_with_its_class():
    class Own(nn.Linear):
        def forward(self, x):
            return x @ self.weight.t()

    model = build("llama", SIZE)
    for layer in model.model.layers:
        for parent, names in ((layer.self_attn, ("q_proj", "k_proj", "v_proj", "o_proj")), (layer.mlp, ("up_proj",))):
            for name in names:
                getattr(parent, name).__class__ = Own
    with pytest.raises(PatchError, match=r"layers\.0\.self_attn\.q_proj \(Own\): its forward is its own.*'block'"):
        patch(model, MemSaveConfig(checkpoint="up"))
    report = patch(model, GATE)
    assert {site.cls: site.status for site in report.sites if site.op == "run_again"} == {
        "Own": "skipped", "Linear": "patched",
    }  # fmt: skip


def test_a_sampled_linear_is_said_not_to_run_again():
    report = patch(build("llama", SIZE), MemSaveConfig(checkpoint="qkv", linear=WTACRS(targets=("q_proj", "o_proj"))))
    assert {site.reason for site in report.skipped if site.op == "run_again"} == {"wta_crs replaces its forward"}
