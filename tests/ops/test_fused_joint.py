"""The gradient of an input that several fused functions take, added up by their products; what may come between."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForSequenceClassification

from hf_memsave.ops.fused import joint
from support.fused_linear import Attention, assert_same_step, autocast, far, net, patched, step
from support.helpers import assert_same_bits, random
from support.kernels import interpreted, rounding  # noqa: F401

pytestmark = interpreted


@pytest.fixture
def added(monkeypatch):
    """Of every gradient that a fused function offered to a joint, whether it was added there."""
    found, add = [], joint.Joint.add
    monkeypatch.setattr(joint.Joint, "add", lambda *args: found.append(add(*args)) or found[-1])
    return found


def learned(model, x, device):
    """The patched model, which knows by now that q, k and v take one input."""
    ours = patched(model)
    step(ours, x, device)
    return ours


def graph(model, x, device):
    """Its input, with a gradient and not a leaf, and its result."""
    x = (x.detach().clone().requires_grad_() * 1.5).requires_grad_()
    with autocast(device):
        return x, model(x).float()


def assert_near(got, stock):
    for mine, theirs in zip(got, stock, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.03, atol=0.03 * float(theirs.abs().amax()))


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
    assert all(added)


def test_nothing_is_added_for_an_input_that_nobody_asks_for(device, monkeypatch):
    ours, joints = learned(Attention().to(device), random(5, 24, device=device), device), []
    add = joint.Joint.add
    monkeypatch.setattr(joint.Joint, "add", lambda self, *args: joints.append(self) or add(self, *args))
    _, y = graph(ours, random(5, 24, device=device), device)
    torch.autograd.grad(y.sum(), list(ours.parameters()))
    assert len(joints) == 3
    assert [one._sums for one in joints] == [{}] * 3


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


@pytest.mark.parametrize("where", ["module", "node"])
def test_hooks_of_a_node_change_what_it_gives(device, where):
    model, x = Attention().to(device), random(5, 24, device=device)
    ours, found = learned(model, x, device), []

    def triple(*args):
        return tuple(None if g is None else g * 3 for g in args[-2])

    for m in (model, ours):
        hooks = [m.k.register_backward_hook(triple)] if where == "module" else []
        into, y = graph(m, x, device)
        if where == "node":
            for node in nodes(y.grad_fn):
                if "_Linear" in node.name() or "Addmm" in node.name():
                    hooks.append(node.register_hook(triple))
        found.append(torch.autograd.grad(y.cos().sum(), into))
        for hook in hooks:
            hook.remove()
    assert_near(found[1], found[0])
    into, y = graph(ours, x, device)
    without = torch.autograd.grad(y.cos().sum(), into)[0]
    assert float((found[1][0] - without).abs().max()) > 0.1


@pytest.mark.parametrize("how", ["batched", "vmap"])
def test_gradients_in_batches(device, how, added):
    model, x = Attention().to(device), random(5, 24, device=device)
    ours, found = learned(model, x, device), []
    v = random(3, 5, 24, device=device, seed=7)
    for m in (model, ours):
        into, y = graph(m, x, device)
        if how == "batched":
            found.append(torch.autograd.grad(y, into, v, is_grads_batched=True)[0])
        else:
            found.append(torch.vmap(lambda g, y=y, into=into: torch.autograd.grad(y, into, g)[0])(v))
    assert added == [False] * 3
    assert_near(found[1:], found[:1])


def test_what_others_take_of_it_too(device, added):
    class Residual(Attention):
        def forward(self, x):
            return super().forward(x) + x.sin() + x

    assert_same_step(Residual().to(device), random(5, 24, device=device), device)
    assert added == [True] * 6


def test_an_error_in_between_leaves_nothing_behind(device):
    ours = learned(Attention().to(device), random(5, 24, device=device), device)
    x, y = graph(ours, random(5, 24, device=device), device)
    exact = torch.autograd.grad(y.cos().sum(), x, retain_graph=True)[0]
    node = y.grad_fn
    while "Linear" not in node.name():
        node = node.next_functions[0][0]
    k = [n for n in nodes(node) if "_Linear" in n.name()][2]

    def fail(*gradients):
        raise ZeroDivisionError

    hook = k.register_prehook(fail)
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(y.cos().sum(), x, retain_graph=True)
    hook.remove()
    assert_same_bits(torch.autograd.grad(y.cos().sum(), x)[0], exact)


def nodes(root):
    """All of a graph."""
    found, left = [], [root]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.append(node)
            left += [n for n, _ in node.next_functions]
    return found


def test_a_backward_within_a_backward(device):
    ours = learned(Attention().to(device), random(5, 24, device=device), device)
    x, y = graph(ours, random(5, 24, device=device), device)
    exact = torch.autograd.grad(y.cos().sum(), x, retain_graph=True)[0]
    inner = []
    k = [n for n in nodes(y.grad_fn) if "_Linear" in n.name()][2]
    again = y.cos().sum()

    def go_back(*gradients):
        hook.remove()
        inner.append(torch.autograd.grad(again, x, retain_graph=True)[0])

    hook = k.register_prehook(go_back)
    outer = torch.autograd.grad(y.cos().sum(), x, retain_graph=True)[0]
    assert_same_bits(outer, exact)
    assert_same_bits(inner[0], exact)


@pytest.mark.parametrize("is_constant", [True, False])
def test_second_derivatives_are_refused(device, is_constant):
    ours = learned(Attention().to(device), random(5, 24, device=device), device)
    x, y = graph(ours, random(5, 24, device=device), device)
    (dx,) = torch.autograd.grad(y.sum() if is_constant else y.cos().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (y.sum() + dx.square().sum()).backward()


@pytest.mark.parametrize("what", ["write", "detach", "data", "no grad", "set data"])
def test_between_two_that_take_it(device, what):
    def between(module, x):
        if what == "write":
            x.mul_(2)
        elif what == "detach":
            x.detach_()
        elif what == "data":
            x.data.mul_(2)
        elif what == "set data":
            x.data = x.data * 2
        else:
            with torch.no_grad():
                module.k(x)

    model, x = Attention().to(device), random(5, 24, device=device)
    quiet = learned(model, x, device)  # it was learned where nothing came between
    quiet.between = model.between = between
    assert_same_step(model, x, device, times=4)
    for _ in range(2):
        got, stock = step(quiet, x, device), step(model, x, device)
        assert_near(got, stock)


def test_the_first_one_without_gradients(device):
    class First(Attention):
        def forward(self, x):
            with torch.no_grad():
                q = self.q(x)
            return self.o((q * self.k(x)).tanh() + self.v(x))

    model = First().to(device)
    ours = patched(model)
    for _ in range(3):
        got, stock = step(ours, random(5, 24, device=device), device), step(model, random(5, 24, device=device), device)
        assert_near([g for g in got if g is not None], [s for s in stock if s is not None])
        assert [g is None for g in got] == [s is None for s in stock]


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


@pytest.mark.parametrize("others", [[1], [2], [0, 1], [0, 1, 2]], ids=str)
def test_what_runs_on_another_stream_is_left_to_autograd(device, monkeypatch, added, others):
    model, x = Attention().to(device), random(5, 24, device=device)
    ours = learned(model, x, device)
    stock, calls = step(model, x, device), []
    into, y = graph(ours, x, device)

    def stream(device):
        calls.append(device)
        return "another" if len(calls) - 1 in others else None

    monkeypatch.setattr(joint, "current_stream", stream)
    if x.is_cuda:
        pytest.skip("it has streams of its own")
    dx = torch.autograd.grad(y.cos().sum(), into)[0]
    assert added == [i not in others for i in range(3)]
    assert_near([dx * 1.5], stock[1:2])


def test_nobody_is_joined_without_gradients(device):
    class Notes:
        def __init__(self):
            self.of = {}

        def notes(self, x):
            return self.of

    tape, x, p = Notes(), random(5, 24, device=device).requires_grad_(), nn.Parameter(random(24, 24, device=device))
    with torch.no_grad():
        assert joint.edge_of(tape, x, p) == (x, None)
    assert joint.edge_of(tape, x.detach(), p)[1] is None
    assert tape.of == {}
    joint.edge_of(tape, x, p)
    assert tape.of


def test_nothing_is_held_by_a_graph_that_is_gone(device):
    ours = learned(Attention().to(device), random(5, 24, device=device), device)
    x, y = graph(ours, random(5, 24, device=device), device)
    held = weakref.ref(x.untyped_storage()), weakref.ref(y.grad_fn.next_functions[0][0])
    gc.collect()
    gc.disable()
    try:
        del x, y
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()
