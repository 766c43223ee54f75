"""Attacks by what is done to a model between its forwards, or inside backward; and by models in each other."""

from functools import partial

import pytest
import torch
from peft import LoraConfig
from torch import nn

from hf_memsave import measure_kept, patch
from support.attacks import WIDTH, Attack, assert_alike, assert_trains_like_stock, flat, trained
from support.helpers import only_on_cpu, random
from support.lora import SIZE, adapted, outputs
from support.steps import assert_same, backward, gradients, patched, step
from support.zoo import batch_for, build


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
        losses = []
        for seed, adapter in enumerate(adapters):
            model.set_adapter(adapter)
            losses.append(model(**batch_for(model, SIZE, seed=seed)).loss)
        with model.disable_adapter():
            losses.append(model(**batch_for(model, SIZE, seed=5)).loss)
        found.append(backward(model, sum(losses)))
    return found


@pytest.mark.parametrize(("switch", "mode"), [(merging, "bf16, fp32 adapters"), (switching, "fp32")])
def test_adapters_are_switched_between_forwards(switch, mode, device):
    only_on_cpu(device)

    def make():
        model = adapted("llama", mode)
        model.add_adapter("second", LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
        return model

    assert_alike(make, switch)


def step_in_hooks(model, kind):
    """Each parameter is written to in backward, as soon as it has its gradient."""
    for parameter in model.parameters():
        optimizer = kind([parameter], 1e-2)

        def update(parameter, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)


@pytest.mark.parametrize("family", ["gpt2", "llama"])  # GPT-2's embedding is its head
def test_an_optimizer_steps_inside_backward(family, device):
    only_on_cpu(device)

    def run(model, autocast):
        step_in_hooks(model, torch.optim.AdamW if family == "llama" else torch.optim.SGD)
        for seed in range(3):
            step(model, batch_for(model, seed=seed), seed, torch.bfloat16 if autocast else None)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert not torch.equal(next(model.parameters()), next(build(family).parameters()))
        return dict(model.named_parameters())

    for autocast in (False, True):
        assert_alike(lambda: build(family).to(device), partial(run, autocast=autocast))


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


@pytest.mark.parametrize(("family", "change"), [("bert", swap_with_twice), ("llama", convert), ("llama", assign_data)])
def test_parameters_are_exchanged_between_steps(family, change, device):
    only_on_cpu(device)

    def run(model):
        batch = batch_for(model)
        before = step(model, batch)
        model.zero_grad()
        change(model)
        after = step(model, batch)
        assert any(before[name].dtype != after[name].dtype or not before[name].equal(after[name]) for name in before)
        return [before, after]

    assert_alike(lambda: build(family).to(device), run)


def gated(model, x):
    return model.g(torch.tanh(model.f(x)) * torch.sigmoid(x))


def test_a_model_calls_another_one_that_it_does_not_hold(device):
    """Gradients are stock's, and two that are patched keep no more than one."""
    x, found, kept = random(2, 16, WIDTH, device=device), [], {}
    for names in ((), ("inner", "outer"), ("outer", "inner"), ("inner",), ("outer",)):
        torch.manual_seed(0)
        inner = Attack(gated).to(device)
        outer = Attack(lambda model, x, inner=inner: gated(model, inner(gated(model, x)))).to(device)
        for name in names:
            patch({"inner": inner, "outer": outer}[name])
        found.append(flat([trained(outer, x), gradients(inner)]))
        assert_same(found[-1], found[0])
        kept[names] = measure_kept(outer, x).total
    assert kept[()] > kept["outer",] >= kept["inner", "outer"]


@pytest.mark.parametrize("where", ["itself", "a model inside"])
def test_a_forward_catches_an_error_of_its_own_and_goes_on(where, device):
    def failing(model, x):
        y = torch.tanh(model.f(x)) * 2
        if y.isfinite().all():
            raise ArithmeticError
        return y

    torch.manual_seed(0)
    inner = patched(Attack(failing).to(device))

    def fn(model, x):
        x = torch.sigmoid(model.f(x)) * x
        try:
            x = failing(model, x) if where == "itself" else inner(x)
        except ArithmeticError:
            x = x + torch.tanh(model.g(x))
        return model.h(torch.exp(-x) * x)

    assert_trains_like_stock(fn, random(2, 16, WIDTH, device=device))
