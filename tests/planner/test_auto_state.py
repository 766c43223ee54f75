"""Auto-Tempo changes nothing in a model but what it converts: weights, eps, modes, gradients, random state."""

import random

import numpy
import pytest
import torch

from hf_memsave.arch.versions import enable_checkpointing
from hf_memsave.errors import PlanError
from hf_memsave.patching.swap import stock_class
from hf_memsave.planner import fast, smart
from support.helpers import halved
from support.planning import EPS, EXACT, SIZE, bert, between, needs, norms, patched
from support.steps import assert_same, patched_classes, state_of, step
from support.zoo import batch_for


class Snapshot:
    """All that trying a model may touch, and must not."""

    def __init__(self, model):
        self.model, self.weights = model, {name: value.clone() for name, value in model.state_dict().items()}
        self.same = [(norm.eps, norm.weight.data_ptr(), norm.bias.data_ptr()) for norm in norms(model)]
        self.same += [module.training for module in model.modules()] + [p.requires_grad for p in model.parameters()]
        self.gradients = [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
        self.random = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
        self.state = state_of(model)

    def check(self, is_stock):
        now = Snapshot(self.model)
        assert_same(now.weights, self.weights)
        assert now.same == self.same
        for (own, values), (before, kept) in zip(now.gradients, self.gradients, strict=True):
            assert own is before and (own is None or torch.equal(values, kept))
        assert torch.equal(now.random[0], self.random[0]) and now.random[1:] == self.random[1:]
        assert {n: stock_class(m) for n, m in self.model.named_modules()} == {n: s[0] for n, s in self.state.items()}
        assert not is_stock or now.state == self.state


class Fault(Exception):
    """Not ours."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("search", "where"), [(smart, None), (fast, None), *halved([smart, fast], ["timer", "forward", "backward"])]
)
def test_a_plan_or_a_fault_leaves_all_but_what_is_converted(search, where, device):
    model = bert(device)  # a part is frozen, a part in training mode, some have gradients, and a buffer counts
    model.set_attn_implementation("sdpa")
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[1].train()
    for parameter in model.bert.encoder.layer[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    model.register_buffer("calls", torch.zeros((), device=device))
    model.register_forward_hook(lambda module, args, output: module.calls.add_(1) and None)
    batch = batch_for(model, SIZE)
    limit = between(model, batch, 0.4) + (0 if search is smart else needs(model, batch))
    snapshot, faults, left = Snapshot(model), 0, 1

    def maybe(here):
        nonlocal left
        left -= here == where
        if here == where and left == 0:
            raise Fault

    def timer(run):
        run()
        random.random(), numpy.random.rand()
        maybe("timer")
        return 1.0

    def forward(**inputs):
        maybe("forward")
        output = model(**inputs)
        output.loss.register_hook(lambda _: maybe("backward"))
        return output

    while True:
        left = 1 + faults
        try:
            plan = search(model, batch, memory=limit, forward=forward, timer=timer)
        except Fault:
            faults += 7 if where == "forward" else 1  # that has many
            snapshot.check(is_stock=True)
        else:
            break
    assert (faults >= 2 or where is None) and plan.converted and {norm.eps for norm in norms(model)} == {EPS}
    snapshot.check(is_stock=False)


def test_a_patched_model_is_refused_and_so_is_reentrant_checkpointing(device):
    model = patched(bert(device), {"norm": "stock"})
    classes, before, batch = patched_classes(model), state_of(model), batch_for(model, SIZE)
    for search in (smart, fast):
        with pytest.raises(PlanError, match=r"expected a stock Bert.*unpatch\(model\) first"):
            search(model, batch, memory="1GiB")
    assert patched_classes(model) == classes and state_of(model) == before
    model = bert(device)
    enable_checkpointing(model, use_reentrant=True)
    model.enable_input_require_grads()
    before = state_of(model)
    with pytest.raises(PlanError, match="which checkpointing with use_reentrant=True cannot"):
        smart(model, batch, "tempo", memory=between(model, batch, 0.4))
    assert state_of(model) == before


def test_an_exact_plan_trains_like_stock(device):
    model = bert(device).train()
    batch = batch_for(model, SIZE)
    stock = step(model, batch)
    plan = smart(model, batch, EXACT, between(model, batch, 0.4, EXACT))
    assert min(dict(plan.config.layers).values()) < SIZE.layers
    timed = [t.seconds for t in plan.trials if t.seconds is not None]
    assert timed and min(timed) > 0
    assert_same(step(model, batch), stock)
