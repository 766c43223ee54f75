"""Fused linears: conversions that are shared or made ahead, and who writes, fails or goes away in between."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_memsave import patch
from hf_memsave.ops.fused import linear
from support.fused_linear import TRITON, Attention, assert_same_step, autocast, net, patched, step
from support.helpers import assert_same_bits, random
from support.kernels import interpreted, rounding  # noqa: F401

pytestmark = interpreted


def write_to_input(module, x):
    x.mul_(0.5)


def write_to_data_of_input(module, x):
    x.data.mul_(0.5)


def write_to_weight(module, x):
    with torch.no_grad():
        module.k.weight.mul_(1.25)


def write_to_data_of_weight(module, x):
    module.k.weight.data.mul_(1.25)


def another_weight(module, x):
    module.k.weight.data = module.k.weight.data.flip(0)


@pytest.mark.parametrize("write", [write_to_data_of_input, write_to_weight, write_to_data_of_weight, another_weight])
def test_what_is_written_to_is_converted_again(device, write):
    stock, x = Attention(write).to(device), random(5, 24, device=device)
    ours = patched(stock)
    for _ in range(4):
        mine, theirs = (step(model, x, device) for model in (ours, stock))
        assert_same_bits(mine[0], theirs[0])


def test_an_alias_of_the_input_made_before_is_seen_too(device):
    class Aliased(Attention):
        def forward(self, x):
            data = x.data
            q = self.q(x)
            data.mul_(0.5)
            return self.o((q * self.k(x)).tanh() + self.v(x))

    stock, x = Aliased().to(device), random(5, 24, device=device)
    ours = patched(stock)
    for _ in range(3):
        assert_same_bits(step(ours, x, device)[0], step(stock, x, device)[0])


def test_an_input_written_to_in_place_was_converted_before(device):
    assert_same_step(Attention(write_to_input).to(device), random(5, 24, device=device), device)


class Branches(nn.Module):
    """Which linears run depends on the step."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(24, 24), nn.Linear(24, 24)
        self.paths = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.number = 0

    def forward(self, x):
        self.number += 1
        return self.last(self.paths[self.number % 3](self.first(x).tanh()).tanh())


def test_what_runs_may_change_from_step_to_step(device, made):
    stock, x = Branches().to(device), random(5, 24, device=device)
    ours = patched(stock)
    for _ in range(7):
        mine, theirs = (step(model, x, device) for model in (ours, stock))
        assert_same_bits(mine[0], theirs[0])
        for a, b in zip(mine[2:], theirs[2:], strict=True):
            assert (a is None) == (b is None)
    assert max(made) <= 6, "a conversion that nobody needed is not made again"


def test_a_weight_that_is_used_twice(device):
    shared = nn.Linear(24, 24)
    assert_same_step(net(device, shared, nn.Tanh(), shared, nn.Linear(24, 3)), random(5, 24, device=device), device)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(device, reentrant):
    inner = Attention().to(device)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.after = inner, nn.Linear(24, 24)

        def forward(self, x):
            return self.after(checkpoint(self.inner, x, use_reentrant=reentrant))

    assert_same_step(Outer().to(device), random(5, 24, device=device), device)


def test_all_forwards_before_all_backwards_and_backward_twice(device):
    model = Attention().to(device)
    x = random(5, 24, device=device)
    expected = [g.clone() for g in step(patched(model), x, device)[2:]]
    ours = patched(model)
    with autocast(device):
        losses = [ours(x * 1.5).float().cos().sum() for _ in range(2)]
    losses[1].backward(retain_graph=True)
    for p, g in zip(ours.parameters(), expected, strict=True):
        assert_same_bits(p.grad, g)
    ours.zero_grad()
    losses[1].backward()
    losses[0].backward()
    for p, g in zip(ours.parameters(), expected, strict=True):
        assert_same_bits(p.grad, 2 * g)


def test_an_optimizer_steps_within_backward(device):
    def train(model):
        optimizers = {p: torch.optim.SGD([p], 0.001) for p in model.parameters()}

        def apply(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(apply)
        for seed in range(5):
            with autocast(device):
                y = model(random(5, 24, device=device, seed=seed))
            y.float().cos().sum().backward()
        return list(model.parameters())

    model = Attention().to(device)
    for mine, theirs in zip(train(patched(model)), train(copy.deepcopy(model)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-8, atol=1e-5)  # stock rounds it to 16 bits


def test_models_that_are_gone_are_forgotten(device):
    model = patched(Attention().to(device))
    for _ in range(2):
        step(model, random(5, 24, device=device), device)
    before = len(linear._forwards._after), len(linear._backwards._after)
    del model
    after = len(linear._forwards._after), len(linear._backwards._after)
    assert after[0] < before[0]
    assert after[1] < before[1]
    assert not linear._running


def test_a_backward_that_fails_leaves_nothing(device):
    model = patched(net(device, *(nn.Linear(64, 64) for _ in range(4))))
    x = random(4, 64, device=device)
    for _ in range(2):
        step(model, x, device)
    hook = model[3].weight.register_hook(lambda g: 1 / 0)
    for _ in range(3):
        with contextlib.suppress(ZeroDivisionError):
            step(model, x, device)
            raise AssertionError("it did not fail")
    hook.remove()
    assert len(linear._running) <= 1
    step(patched(net(device, nn.Linear(64, 64))), x, device)
    assert not linear._running


def test_a_weight_may_change_before_a_backward_that_does_not_need_it(device):
    stock, x = net(device, nn.Linear(24, 24)), random(5, 24, device=device)
    ours = patched(stock)
    for model in (stock, ours):
        with autocast(device):
            y = model(x)
        with torch.no_grad():
            model[0].weight.mul_(2)
        y.float().pow(2).sum().backward()
    got, expected = (model[0].weight.grad for model in (ours, stock))
    torch.testing.assert_close(got, expected, rtol=2**-8, atol=1e-5)  # stock rounds it to 16 bits


def test_parameters_in_a_buffer_that_others_write_to(device):
    class Flat(Attention):
        def __init__(self):
            super().__init__(lambda module, x: module.flat.mul_(1.5))
            self.flat = torch.cat([p.detach().flatten() for p in self.parameters()])
            for p, part in zip(self.parameters(), self.flat.split([p.numel() for p in self.parameters()]), strict=True):
                p.data = part.view_as(p)

    x = random(5, 24, device=device)
    found = []
    for config in (None, TRITON):
        torch.manual_seed(0)
        model = Flat()
        if config is not None:
            patch(model, config)
        found.append([])
        for _ in range(3):
            with autocast(device):
                found[-1].append(model(x).detach())
    for mine, theirs in zip(*found, strict=True):
        assert_same_bits(mine, theirs)
