"""The gradient of an input that several fused functions take: added up by their products, or left to autograd."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import grad
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertSelfOutput

from hf_memsave.ops.fused import joint
from support import fused_linear as fused
from support import steps
from support.helpers import assert_same_bits, random
from support.kernels import interpreted, rounding  # noqa: F401

pytestmark = interpreted


@pytest.fixture
def x(device):
    return random(5, 24, device=device)


@pytest.fixture
def ours(device, x):
    """A patched model that has learned that three linears take one input."""
    return fused.learned(fused.Attention().to(device), x, device)


def linears(y):
    return [node for node in fused.nodes(y.grad_fn) if "_Linear" in node.name()]


def test_three_linears_add_to_one_gradient_once_that_is_known_and_to_the_same_sum(device, x, added):
    ours = fused.patched(fused.Attention().to(device))
    apart = fused.step(ours, x, device)
    assert added == []
    together = fused.step(ours, x, device)
    assert added == [True] * 3
    for place, (mine, theirs) in enumerate(zip(together, apart, strict=True)):
        if place == 1:  # the input's
            assert float((mine - theirs).norm() / theirs.norm()) < 1e-6, "both sum in fp32"
        else:
            assert_same_bits(mine, theirs)


def test_a_linear_that_is_alone_has_no_joint(device, x, added):
    ours = fused.patched(fused.net(device, nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2)))
    for _ in range(3):
        fused.step(ours, x, device)
    assert added == []


def again_and_again(model, into, y):
    into.retain_grad()
    return [y.cos().sum().backward(retain_graph=True) or into.grad.clone() for _ in range(3)]


def with_a_hook(model, into, y):
    seen = []
    into.register_hook(lambda g: seen.append(g.clone()) or g * 2)
    return [*grad(y.cos().sum(), into), *seen]


def triple(*args):
    return tuple(None if g is None else g * 3 for g in args[-2])


def with_hooks_of_nodes(model, into, y):
    (before,) = grad(y.cos().sum(), into, retain_graph=True)
    for node in fused.nodes(y.grad_fn):
        if "_Linear" in node.name() or "Addmm" in node.name():
            node.register_hook(triple)
    (after,) = grad(y.cos().sum(), into)
    assert float((after - before).abs().max()) > 0.1
    return [after]


def in_batches(model, into, y):
    v = random(3, *y.shape, device=y.device, seed=7)
    return [
        *grad(y, into, v, is_grads_batched=True, retain_graph=True),
        torch.vmap(lambda g: grad(y, into, g, retain_graph=True)[0])(v),
    ]


def of(choose):
    """The gradients of what ``choose(model, into)`` says, twice."""

    def ask(model, into, y):
        return [g for _ in range(2) for g in grad(y.cos().sum(), choose(model, into), retain_graph=True)]

    return ask


#: What is asked of a graph of three linears, and whether they then add to one gradient.
ASKED = {
    "x": (of(lambda model, into: [into]), {True}),
    "weights": (of(lambda model, into: list(model.parameters())), {False}),
    "both": (of(lambda model, into: [into, *model.parameters()]), {True}),
    "q": (of(lambda model, into: [model.q.weight]), {False}),
    "k and x": (of(lambda model, into: [model.k.bias, into]), {True}), "again and again": (again_and_again, {True}),
    "with a hook, which sees the whole": (with_a_hook, {True}), "with hooks of nodes": (with_hooks_of_nodes, {True}),
    "in batches": (in_batches, {False}),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_gradients_are_stocks(device, x, name, added):
    ask, expected = ASKED[name]
    model = fused.Attention().to(device)
    got, stock = (ask(m, *fused.graph(m, x, device)) for m in (fused.learned(model, x, device), model))
    fused.assert_near(got, stock)
    assert set(added) == expected


class Parts(fused.Attention):
    def forward(self, x):
        return torch.stack([self.q(x), self.k(x), self.v(x)])


@pytest.mark.parametrize("part", [slice(0, 1), slice(2, 3), slice(0, 2), slice(0, 3)], ids=str)
def test_a_part_of_the_graph(device, x, part):
    model = Parts().to(device)
    graphs = [fused.graph(m, x, device) for m in (fused.learned(model, x, device), model)]
    fused.assert_near(*(grad(y[part].cos().sum(), into) for into, y in graphs))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_residual_is_where_the_sum_begins(device, added, dropout):
    model, batch = fused.bert(device, dropout)
    ours = fused.patched(model)

    def gradients(m, low=torch.bfloat16):
        return list(steps.step(m, batch, low=low).values())[1:]

    apart = gradients(ours)
    assert added == []
    together = gradients(ours)
    assert added == [True] * 2 * (4 + 2)  # q, k, v and a residual; the other one and the linear that takes it
    for mine, theirs in zip(together, apart, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.01 * float(theirs.abs().amax()))
    if not dropout:
        exact = gradients(copy.deepcopy(model).double(), None)
        mine, stocks = (fused.far(found, exact) for found in (together, gradients(model)))
        ratios = [a / b for a, b in zip(mine, stocks, strict=True) if b]
        assert sum(ratios) / len(ratios) < 1


class Early(nn.Module):
    """A residual is added before the last linear takes it, whose product so comes first in backward."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(24, 24), nn.Linear(24, 24)
        self.norm = BertSelfOutput(BertConfig(hidden_size=24, hidden_dropout_prob=0.0))

    def forward(self, x):
        y = self.norm(self.first(x).tanh(), x)
        return y + self.last(x)


def test_a_residual_adds_to_what_products_have_added_up(device, x, added):
    model = Early().to(device)
    ours = fused.patched(model)
    for _ in range(3):
        fused.assert_near(fused.step(ours, x, device), fused.step(model, x, device))
    assert added[-3:] == [True] * 3


def test_hooks_of_a_module_change_what_it_gives(device, x):
    model, found = fused.Attention().to(device), []
    for m in (fused.learned(model, x, device), model):
        m.k.register_backward_hook(triple)
        into, y = fused.graph(m, x, device)
        found.append(grad(y.cos().sum(), into))
    fused.assert_near(*found)


@pytest.mark.parametrize("fails", [True, False])
def test_a_backward_that_fails_or_runs_within_another_leaves_nothing_behind(device, x, ours, fails):
    into, y = fused.graph(ours, x, device)
    exact = grad(y.cos().sum(), into, retain_graph=True)[0]
    found, again = [], y.cos().sum()

    def go_back(*gradients):
        hook.remove()
        if fails:
            raise ZeroDivisionError
        found.append(grad(again, into, retain_graph=True)[0])

    hook = linears(y)[2].register_prehook(go_back)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        found += grad(y.cos().sum(), into, retain_graph=True)
    found += grad(y.cos().sum(), into)
    assert len(found) == (1 if fails else 3)
    for gradient in found:
        assert_same_bits(gradient, exact)


@pytest.mark.parametrize("is_constant", [True, False])
def test_second_derivatives_are_refused(device, x, ours, is_constant):
    into, y = fused.graph(ours, x, device)
    (dx,) = grad(y.sum() if is_constant else y.cos().sum(), into, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (y.sum() + dx.square().sum()).backward()


def run_without_gradients(module, x):
    with torch.no_grad():
        module.k(x)


BETWEEN = {
    "write": lambda module, x: x.mul_(2), "detach": lambda module, x: x.detach_(),
    "data": lambda module, x: x.data.mul_(2), "set data": lambda module, x: setattr(x, "data", x.data * 2),
    "no grad": run_without_gradients,
}  # fmt: skip


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_between_two_that_take_it(device, x, between):
    model = fused.Attention().to(device)
    quiet = fused.learned(model, x, device)  # it was learned where nothing came between
    quiet.between = model.between = between
    fused.assert_same_step(model, x, device, times=4)
    for _ in range(2):
        fused.assert_near(fused.step(quiet, x, device), fused.step(model, x, device))


@pytest.mark.skipif(torch.cuda.is_available(), reason="does not apply: it has streams of its own")
@pytest.mark.parametrize("others", [[1], [0, 1], [0, 1, 2]], ids=str)
def test_what_runs_on_another_stream_is_left_to_autograd(device, x, monkeypatch, added, others):
    model, calls = fused.Attention().to(device), []
    into, y = fused.graph(fused.learned(model, x, device), x, device)
    stock = fused.step(model, x, device)
    monkeypatch.setattr(
        joint, "current_stream", lambda device: calls.append(device) or (len(calls) - 1 in others or None)
    )
    dx = grad(y.cos().sum(), into)[0]
    assert added == [i not in others for i in range(3)]
    fused.assert_near([dx * 1.5], stock[1:2])


def test_nothing_is_held_by_a_graph_that_is_gone(device, x, ours):
    into, y = fused.graph(ours, x, device)
    held = weakref.ref(into.untyped_storage()), weakref.ref(y.grad_fn.next_functions[0][0])
    gc.collect()
    gc.disable()
    try:
        del into, y
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()
