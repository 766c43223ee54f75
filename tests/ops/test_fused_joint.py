"""The gradient of an input that several fused functions take, added up by their products."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForSequenceClassification

from support.fused_linear import Attention, assert_near, assert_same_step, far, graph, learned, net, patched, step
from support.helpers import assert_same_bits, random
from support.kernels import interpreted, rounding  # noqa: F401

pytestmark = interpreted


def test_three_linears_add_to_one_gradient_once_that_is_known(device, added):
    ours, x = patched(Attention().to(device)), random(5, 24, device=device)
    step(ours, x, device)
    assert added == []
    step(ours, x, device)
    assert added == [True] * 3


def test_a_linear_that_is_alone_has_no_joint(device, added):
    ours, x = patched(net(device, nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2))), random(5, 24, device=device)
    for _ in range(3):
        step(ours, x, device)
    assert added == []


def test_the_sum_is_no_farther_from_float64_than_autograds(device):
    model, ratios = Attention().to(device), []
    for seed in range(8):
        x = random(5, 24, device=device, seed=seed)
        ours = patched(model)
        apart = step(ours, x, device)  # in the first step autograd adds
        for _ in range(2):
            together = step(ours, x, device)
            assert_same_bits(together[0], apart[0])
            for mine, theirs in zip(together[2:], apart[2:], strict=True):
                assert_same_bits(mine, theirs)
        ratios.append(float((together[1] - apart[1]).norm() / apart[1].norm()))
    assert max(ratios) < 1e-6, "both sum in fp32"


@pytest.mark.parametrize("wanted", ["x", "weights", "both", "q", "k and x"])
def test_gradients_of_some_alone(device, wanted, added):
    model, x = Attention().to(device), random(5, 24, device=device)
    ours = learned(model, x, device)

    def found(model):
        into, y = graph(model, x, device)
        chosen = {
            "x": [into], "weights": list(model.parameters()), "both": [into, *model.parameters()],
            "q": [model.q.weight], "k and x": [model.k.bias, into],
        }[wanted]  # fmt: skip
        return [torch.autograd.grad(y.cos().sum(), chosen, retain_graph=True) for _ in range(2)]

    got, stock = found(ours), found(model)
    for mine, theirs in zip(got, stock, strict=True):
        assert_near(mine, theirs)
    assert_same_bits(got[0][0], got[1][0])
    assert added
    assert set(added) == {wanted not in ("weights", "q")}


def test_nothing_is_added_for_an_input_that_nobody_asks_for(device, added):
    ours = learned(Attention().to(device), random(5, 24, device=device), device)
    _, y = graph(ours, random(5, 24, device=device), device)
    torch.autograd.grad(y.sum(), list(ours.parameters()))
    assert added == [False] * 3


def test_backward_again_and_again(device):
    ours = learned(Attention().to(device), random(5, 24, device=device), device)
    x, y = graph(ours, random(5, 24, device=device), device)
    x.retain_grad()
    for times in (1, 2, 3):
        y.cos().sum().backward(retain_graph=True)
        if times == 1:
            once = x.grad.clone()
        torch.testing.assert_close(x.grad, once * times)


def test_a_part_of_the_graph(device):
    class Parts(Attention):
        def forward(self, x):
            return torch.stack([self.q(x), self.k(x), self.v(x)])

    model, x = Parts().to(device), random(5, 24, device=device)
    ours = learned(model, x, device)
    for part in (slice(0, 1), slice(1, 2), slice(2, 3), slice(0, 2), slice(0, 3)):
        got, stock = ([torch.autograd.grad(y[part].cos().sum(), i)[0]] for i, y in (
            graph(ours, x, device), graph(model, x, device)))  # fmt: skip
        assert_near(got, stock)


def test_hooks_see_the_whole_gradient(device, added):
    model, x = Attention().to(device), random(5, 24, device=device)
    ours, seen = learned(model, x, device), []
    for m in (model, ours):
        into, y = graph(m, x, device)
        into.register_hook(lambda g: seen.append(g.clone()) or g * 2)
        before = torch.autograd.grad(y.cos().sum(), into)[0]
        assert_near([before], [seen[-1] * 2])
    assert_near(seen[1:], seen[:1])
    assert added == [True] * 3


def test_what_others_take_of_it_too(device, added):
    class Residual(Attention):
        def forward(self, x):
            return super().forward(x) + x.sin() + x

    assert_same_step(Residual().to(device), random(5, 24, device=device), device)
    assert added == [True] * 6


@pytest.mark.parametrize("frozen", ["q", "k", "v", "qkv"])
def test_frozen_linears(device, frozen):
    model, x = Attention().to(device), random(5, 24, device=device)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    ours = patched(model)
    for _ in range(3):
        got, stock = step(ours, x, device), step(model, x, device)
        assert [g is None for g in got] == [s is None for s in stock]
        assert_near([g for g in got if g is not None], [s for s in stock if s is not None])


@pytest.mark.parametrize("reentrant", [True, False])
def test_in_a_checkpoint(device, reentrant):
    class Checkpointed(Attention):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    assert_same_step(Checkpointed().to(device), random(5, 24, device=device), device)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_residual_is_where_the_sum_begins(device, added, dropout):
    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, vocab_size=40,
        attention_probs_dropout_prob=0.0, hidden_dropout_prob=dropout,
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).to(device).train()
    ids = torch.arange(24, device=device).reshape(2, 12)
    ours = patched(model)

    def gradients(m, dtype=torch.bfloat16):
        m.zero_grad()
        torch.manual_seed(1)
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype is torch.bfloat16):
            loss = m(input_ids=ids, labels=ids[:, 0] % 2).loss
        loss.backward()
        return [p.grad.clone() for p in m.parameters()]

    apart = gradients(ours)
    assert added == []
    together = gradients(ours)
    assert added == [True] * 2 * (4 + 2)  # q, k, v and a residual; the other one and the linear that takes it
    for mine, theirs in zip(together, apart, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.01 * float(theirs.abs().amax()))
    if not dropout:
        wide = copy.deepcopy(model).double()
        exact = gradients(wide, torch.float64)
        ratios = [a / b for a, b in zip(far(together, exact), far(gradients(model), exact), strict=True) if b]
        assert sum(ratios) / len(ratios) < 1
