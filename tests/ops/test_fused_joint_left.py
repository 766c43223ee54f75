"""What may come between functions that add up a gradient, and what is left to autograd's own sums."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_memsave.ops.fused import joint
from support.fused_linear import Attention, assert_near, assert_same_step, graph, learned, nodes, patched, step
from support.helpers import assert_same_bits, random
from support.kernels import interpreted, rounding  # noqa: F401

pytestmark = interpreted


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
        pytest.skip("does not apply: it has streams of its own")
    dx = torch.autograd.grad(y.cos().sum(), into)[0]
    assert added == [i not in others for i in range(3)]
    assert_near([dx * 1.5], stock[1:2])


def test_nobody_is_joined_without_gradients(device):
    tape, x, p = (
        SimpleNamespace(memo={}),
        random(5, 24, device=device).requires_grad_(),
        nn.Parameter(random(24, 24, device=device)),
    )
    with torch.no_grad():
        assert joint.edge_of(tape, x, p) == (x, None)
    assert joint.edge_of(tape, x.detach(), p)[1] is None
    assert tape.memo == {}
    joint.edge_of(tape, x, p)
    assert tape.memo


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
