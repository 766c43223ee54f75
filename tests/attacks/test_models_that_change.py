"""Attacks by what is done to a model between its forwards, or inside backward; and by models in each other."""

import copy

import pytest
import torch
from peft import LoraConfig
from torch import nn

from hf_memsave import measure_kept, patch
from support.attacks import WIDTH, Attack, assert_trains_like_stock, trained
from support.families import batch_for, build
from support.helpers import only_on_cpu, random
from support.lora import SIZE, adapted, outputs
from support.steps import assert_same, gradients, step


def pair(model):
    """Stock, and a patched copy."""
    ours = copy.deepcopy(model)
    patch(ours)
    return model, ours


# PEFT


def merging(model):
    """A step, one forward while the adapter is merged, and a step."""
    before = step(model, batch_for(model, SIZE))
    model.merge_adapter()
    merged = {"logits": outputs(model)}
    model.unmerge_adapter()
    return [before, merged, step(model, batch_for(model, SIZE, seed=1))]


def switching(model):
    """Two adapters, and none, in the forwards of one backward."""
    found = []
    for adapters in (("default", "second"), ("second", "default"), ("second", "second")):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(7)
        losses = []
        for seed, adapter in enumerate(adapters):
            model.set_adapter(adapter)
            losses.append(model(**batch_for(model, SIZE, seed=seed)).loss)
        with model.disable_adapter():
            losses.append(model(**batch_for(model, SIZE, seed=5)).loss)
        sum(losses).backward()
        found.append({"loss": sum(losses).detach(), **gradients(model)})
    return found


@pytest.mark.parametrize("mode", ["fp32", "bf16, fp32 adapters"])
@pytest.mark.parametrize("switch", [merging, switching])
def test_adapters_are_switched_between_forwards(switch, mode, device):
    only_on_cpu(device)
    model = adapted("llama", mode)
    model.add_adapter("second", LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    stock, ours = pair(model)
    for got, expected in zip(switch(ours), switch(stock), strict=True):
        assert_same(got, expected)


# Parameters


def step_in_hooks(model, kind):
    """Each parameter is written to in backward, as soon as it has its gradient."""
    for parameter in model.parameters():
        optimizer = kind([parameter], 1e-2)

        def update(parameter, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])  # GPT-2's embedding is its head
def test_an_optimizer_steps_inside_backward(family, autocast, device):
    only_on_cpu(device)
    parameters = []
    for is_ours in (False, True):
        model = build(family).to(device)
        if is_ours:
            patch(model)
        step_in_hooks(model, torch.optim.AdamW if family == "llama" else torch.optim.SGD)
        for seed in range(3):
            torch.manual_seed(seed)
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                loss = model(**batch_for(model, seed=seed)).loss
            loss.backward()
        parameters.append(dict(model.named_parameters()))
        assert all(parameter.grad is None for parameter in model.parameters())
    stock, ours = parameters
    assert_same(ours, stock)
    assert not torch.equal(next(iter(ours.values())), next(build(family).parameters()))


def swap_with_twice(model):
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(2 * parameter.detach()))


def convert(model):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def assign_data(model):
    for parameter in model.parameters():
        parameter.data = 2 * parameter.data


@pytest.mark.parametrize("change", [swap_with_twice, convert, assign_data], ids=lambda change: change.__name__)
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_parameters_are_exchanged_between_steps(family, change, device):
    only_on_cpu(device)
    stock, ours = pair(build(family).to(device))
    batch, found = batch_for(stock), []
    for model in (ours, stock):
        before = step(model, batch)
        model.zero_grad()
        change(model)
        after = step(model, batch)
        assert any(before[name].dtype != after[name].dtype or not before[name].equal(after[name]) for name in before)
        found.append([before, after])
    for got, expected in zip(*found, strict=True):
        assert_same(got, expected)


# Two models


def gated(model, x):
    return model.g(torch.tanh(model.f(x)) * torch.sigmoid(x))


@pytest.mark.parametrize("patched", [("inner", "outer"), ("outer", "inner"), ("inner",), ("outer",)], ids=" ".join)
def test_a_model_calls_another_one_that_it_does_not_hold(patched, device):
    x, found = random(2, 16, WIDTH, device=device), []
    for names in (patched, ()):
        torch.manual_seed(0)
        inner = Attack(gated).to(device)
        outer = Attack(lambda model, x, inner=inner: gated(model, inner(gated(model, x)))).to(device)
        for name in names:
            patch({"inner": inner, "outer": outer}[name])
        found.append([*trained(outer, x), gradients(inner)])
    for got, expected in zip(*found, strict=True):
        assert_same(got, expected)


def test_two_models_one_in_the_other_keep_less_than_one(device):
    x, kept = random(2, 16, WIDTH, device=device), []
    for names in ((), ("outer",), ("inner", "outer")):
        inner = Attack(gated).to(device)
        outer = Attack(lambda model, x, inner=inner: gated(model, inner(gated(model, x)))).to(device)
        for name in names:
            patch({"inner": inner, "outer": outer}[name])
        kept.append(measure_kept(outer, x).total)
    assert kept[0] > kept[1] >= kept[2]


@pytest.mark.parametrize("where", ["itself", "a model inside"])
def test_a_forward_catches_an_error_of_its_own_and_goes_on(where, device):
    def failing(model, x):
        y = torch.tanh(model.f(x)) * 2
        if y.isfinite().all():
            raise ArithmeticError
        return y

    torch.manual_seed(0)
    inner = Attack(failing).to(device)
    patch(inner)

    def fn(model, x):
        x = torch.sigmoid(model.f(x)) * x
        try:
            x = failing(model, x) if where == "itself" else inner(x)
        except ArithmeticError:
            x = x + torch.tanh(model.g(x))
        return model.h(torch.exp(-x) * x)

    assert_trains_like_stock(fn, random(2, 16, WIDTH, device=device))
