"""The gradient of an input that several fused functions take: added up by their products, or left to autograd."""

import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_memsave.ops.fused import joint
from support.fused_linear import (
    Attention,
    assert_near,
    assert_same_step,
    bert,
    far,
    graph,
    learned,
    net,
    nodes,
    patched,
    step,
)  # fmt: skip
from support.helpers import assert_same_bits, random
from support.kernels import interpreted, rounding  # noqa: F401

pytestmark = interpreted


@pytest.fixture
def x(device):
    return random(5, 24, device=device)


@pytest.fixture
def ours(device, x):
    """A patched model that has learned that three linears take one input."""
    return learned(Attention().to(device), x, device)


def linears(y):
    return [node for node in nodes(y.grad_fn) if "_Linear" in node.name()]


def test_three_linears_add_to_one_gradient_once_that_is_known_and_to_the_same_sum(device, x, added):
    ours = patched(Attention().to(device))
    apart = step(ours, x, device)
    assert added == []
    together = step(ours, x, device)
    assert added == [True] * 3
    for place, (mine, theirs) in enumerate(zip(together, apart, strict=True)):
        if place == 1:  # the input's
            assert float((mine - theirs).norm() / theirs.norm()) < 1e-6, "both sum in fp32"
        else:
            assert_same_bits(mine, theirs)


def test_a_linear_that_is_alone_has_no_joint(device, x, added):
    ours = patched(net(device, nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2)))
    for _ in range(3):
        step(ours, x, device)
    assert added == []


@pytest.mark.parametrize("wanted", ["x", "weights", "both", "q", "k and x"])
def test_gradients_of_some_alone(device, x, wanted, added):
    model = Attention().to(device)
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


def test_backward_again_and_again(device, x, ours):
    into, y = graph(ours, x, device)
    into.retain_grad()
    for times in (1, 2, 3):
        y.cos().sum().backward(retain_graph=True)
        if times == 1:
            once = into.grad.clone()
        torch.testing.assert_close(into.grad, once * times)


def test_a_part_of_the_graph(device, x):
    class Parts(Attention):
        def forward(self, x):
            return torch.stack([self.q(x), self.k(x), self.v(x)])

    model = Parts().to(device)
    ours = learned(model, x, device)
    for part in (slice(0, 1), slice(1, 2), slice(2, 3), slice(0, 2), slice(0, 3)):
        found = []
        for m in (ours, model):
            into, y = graph(m, x, device)
            found.append(torch.autograd.grad(y[part].cos().sum(), into))
        assert_near(*found)


def test_hooks_see_the_whole_gradient(device, x, added):
    model, seen = Attention().to(device), []
    for m in (model, learned(model, x, device)):
        into, y = graph(m, x, device)
        into.register_hook(lambda g: seen.append(g.clone()) or g * 2)
        before = torch.autograd.grad(y.cos().sum(), into)[0]
        assert_near([before], [seen[-1] * 2])
    assert_near(seen[1:], seen[:1])
    assert added == [True] * 3


class Residual(Attention):
    def forward(self, x):
        return super().forward(x) + x.sin() + x


class Checkpointed(Attention):
    reentrant = False

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class FirstWithoutGradients(Attention):
    def forward(self, x):
        with torch.no_grad():
            q = self.q(x)
        return self.o((q * self.k(x)).tanh() + self.v(x))


@pytest.mark.parametrize("cls", [Residual, Checkpointed, Reentrant, FirstWithoutGradients])
def test_a_step_is_stocks(device, x, cls, added):
    assert_same_step(cls().to(device), x, device)
    assert cls is not Residual or added == [True] * 6


@pytest.mark.parametrize("frozen", ["q", "k", "v", "qkv"])
def test_frozen_linears(device, x, frozen):
    model = Attention().to(device)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    assert_same_step(model, x, device)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_residual_is_where_the_sum_begins(device, added, dropout):
    model, _ = bert(device, dropout, intermediate=48, words=40)
    ids = torch.arange(24, device=device).reshape(2, 12)
    batch, ours = {"input_ids": ids, "labels": ids[:, 0] % 2}, patched(model)

    def gradients(m, dtype=torch.bfloat16):
        m.zero_grad()
        torch.manual_seed(1)
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype is torch.bfloat16):
            loss = m(**batch).loss
        loss.backward()
        return [p.grad.clone() for p in m.parameters()]

    apart = gradients(ours)
    assert added == []
    together = gradients(ours)
    assert added == [True] * 2 * (4 + 2)  # q, k, v and a residual; the other one and the linear that takes it
    for mine, theirs in zip(together, apart, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.01 * float(theirs.abs().amax()))
    if not dropout:
        exact = gradients(copy.deepcopy(model).double(), torch.float64)
        ratios = [a / b for a, b in zip(far(together, exact), far(gradients(model), exact), strict=True) if b]
        assert sum(ratios) / len(ratios) < 1


# What is left to autograd


@pytest.mark.parametrize("where", ["module", "node"])
def test_hooks_of_a_node_change_what_it_gives(device, x, ours, where):
    model, found = Attention().to(device), []
    model.load_state_dict(ours.state_dict())

    def triple(*args):
        return tuple(None if g is None else g * 3 for g in args[-2])

    for m in (model, ours):
        hooks = [m.k.register_backward_hook(triple)] if where == "module" else []
        into, y = graph(m, x, device)
        if where == "node":
            of_linears = [n for n in nodes(y.grad_fn) if "_Linear" in n.name() or "Addmm" in n.name()]
            hooks += [node.register_hook(triple) for node in of_linears]
        found.append(torch.autograd.grad(y.cos().sum(), into))
        for hook in hooks:
            hook.remove()
    assert_near(found[1], found[0])
    into, y = graph(ours, x, device)
    without = torch.autograd.grad(y.cos().sum(), into)[0]
    assert float((found[1][0] - without).abs().max()) > 0.1


@pytest.mark.parametrize("how", ["batched", "vmap"])
def test_gradients_in_batches(device, x, how, added):
    model, found = Attention().to(device), []
    v = random(3, 5, 24, device=device, seed=7)
    for m in (model, learned(model, x, device)):
        into, y = graph(m, x, device)
        if how == "batched":
            found.append(torch.autograd.grad(y, into, v, is_grads_batched=True)[0])
        else:
            found.append(torch.vmap(lambda g, y=y, into=into: torch.autograd.grad(y, into, g)[0])(v))
    assert added == [False] * 3
    assert_near(found[1:], found[:1])


def test_an_error_in_between_leaves_nothing_behind(device, x, ours):
    into, y = graph(ours, x, device)
    exact = torch.autograd.grad(y.cos().sum(), into, retain_graph=True)[0]

    def fail(*gradients):
        raise ZeroDivisionError

    hook = linears(y)[2].register_prehook(fail)
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(y.cos().sum(), into, retain_graph=True)
    hook.remove()
    assert_same_bits(torch.autograd.grad(y.cos().sum(), into)[0], exact)


def test_a_backward_within_a_backward(device, x, ours):
    into, y = graph(ours, x, device)
    exact = torch.autograd.grad(y.cos().sum(), into, retain_graph=True)[0]
    inner, again = [], y.cos().sum()

    def go_back(*gradients):
        hook.remove()
        inner.append(torch.autograd.grad(again, into, retain_graph=True)[0])

    hook = linears(y)[2].register_prehook(go_back)
    outer = torch.autograd.grad(y.cos().sum(), into, retain_graph=True)[0]
    assert_same_bits(outer, exact)
    assert_same_bits(inner[0], exact)


@pytest.mark.parametrize("is_constant", [True, False])
def test_second_derivatives_are_refused(device, x, ours, is_constant):
    into, y = graph(ours, x, device)
    (dx,) = torch.autograd.grad(y.sum() if is_constant else y.cos().sum(), into, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (y.sum() + dx.square().sum()).backward()


def set_data(module, x):
    x.data = x.data * 2


def run_without_gradients(module, x):
    with torch.no_grad():
        module.k(x)


BETWEEN = {
    "write": lambda module, x: x.mul_(2),
    "detach": lambda module, x: x.detach_(),
    "data": lambda module, x: x.data.mul_(2),
    "set data": set_data,
    "no grad": run_without_gradients,
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_between_two_that_take_it(device, x, between):
    model = Attention().to(device)
    quiet = learned(model, x, device)  # it was learned where nothing came between
    quiet.between = model.between = between
    assert_same_step(model, x, device, times=4)
    for _ in range(2):
        assert_near(step(quiet, x, device), step(model, x, device))


@pytest.mark.parametrize("others", [[1], [2], [0, 1], [0, 1, 2]], ids=str)
def test_what_runs_on_another_stream_is_left_to_autograd(device, x, monkeypatch, added, others):
    model = Attention().to(device)
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


def test_nothing_is_joined_without_gradients(device, x):
    tape, p = SimpleNamespace(memo={}), nn.Parameter(random(24, 24, device=device))
    x.requires_grad_()
    with torch.no_grad():
        assert joint.edge_of(tape, x, p) == (x, None)
    assert joint.edge_of(tape, x.detach(), p)[1] is None
    assert tape.memo == {}
    joint.edge_of(tape, x, p)
    assert tape.memo


def test_nothing_is_held_by_a_graph_that_is_gone(device, x, ours):
    into, y = graph(ours, x, device)
    held = weakref.ref(into.untyped_storage()), weakref.ref(y.grad_fn.next_functions[0][0])
    gc.collect()
    gc.disable()
    try:
        del into, y
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()
