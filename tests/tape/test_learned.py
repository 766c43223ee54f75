"""What a forward need not record, as earlier ones have shown: nothing that is kept, or computed, changes by it."""

import copy
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hf_memsave import patch
from hf_memsave.patching import taped
from hf_memsave.tape import Tape, price
from hf_memsave.tape.meter import measure_kept
from support.attacks import WIDTH, Attack, Block, trained
from support.families import FAMILIES, MORE, Size, batch_for, build
from support.helpers import taping
from support.steps import assert_same, gradients

ENOUGH = 5


@pytest.fixture
def tapes(monkeypatch):
    """Of every tape that is laid, in order: what it decided by, and what it had made and asked in the end."""
    found, enter, learn = [], Tape.__enter__, price.Plan.close

    def noted(tape):
        found.append(SimpleNamespace(decided=tape.decided, made=[], asked=set(), plan=weakref.ref(tape.plan)))
        return enter(tape)

    def learned(plan, is_foreign):
        last = next(one for one in found if one.plan() is plan)
        last.made, last.asked = plan.made, plan.asked
        learn(plan, is_foreign)

    monkeypatch.setattr(Tape, "__enter__", noted)
    monkeypatch.setattr(price.Plan, "close", learned)
    return found


@pytest.mark.parametrize("mode", ["fp32", "autocast"])
@pytest.mark.parametrize("family", FAMILIES + MORE)
def test_only_what_is_asked_for_is_recorded_and_as_much_is_kept(family, mode, tapes, device):
    stock = build(family, Size(), dropout=0.1).to(device)
    model, batch = copy.deepcopy(stock), batch_for(stock, Size())
    patch(model)

    first = kept_in(mode, model, batch)
    for number in range(ENOUGH):
        assert_same(step_of(model, batch, mode, number), step_of(stock, batch, mode, number))
    *_, before, last = tapes
    assert len(last.made) == len(before.made) < len(tapes[0].made)
    assert set(last.made) <= last.asked
    assert kept_in(mode, model, batch) <= first


def kept_in(mode, model, batch):
    with torch.autocast(model.device.type, torch.bfloat16, enabled=mode == "autocast"):
        return measure_kept(model, batch).total


def step_of(model, batch, mode, number):
    model.zero_grad()
    torch.manual_seed(number)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=mode == "autocast"):
        loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def branching(model, x):
    """In training mode nobody asks how ``y`` was made; else it is kept three times over."""
    y = torch.sin(model.f(x))
    if model.training:
        return model.g(x + y)
    return model.g(x + y) * y + F.silu(y)


def test_another_forward_that_begins_alike_is_stocks_to_the_bit(device):
    x = torch.randn(8, WIDTH, device=device)
    torch.manual_seed(0)
    stock = Attack(branching).to(device).train()
    ours = copy.deepcopy(stock)
    patch(ours)
    for is_training in (True, False, True, False):
        stock.train(is_training)
        ours.train(is_training)
        for got, expected in zip(trained(ours, x, ENOUGH), trained(stock, x, ENOUGH), strict=True):
            assert_same(got, expected)
        assert measure_kept(ours, x).total <= measure_kept(stock, x).total


def count_of(model):
    decided = taped._decided[model]
    return len(decided) + len(decided.earlier)


def test_what_batches_of_other_lengths_decided_is_forgotten(device, monkeypatch):
    """And decided again alike: as much is kept as before, with stock's bits."""
    monkeypatch.setattr(price, "MOST_FORWARDS", 8)
    stock = build("bert", Size(layers=1), dropout=0.1).to(device)
    model, counts = copy.deepcopy(stock), []
    patch(model)

    def batch_of(length):
        return batch_for(stock, replace(Size(), seq=length))

    kept = {length: measure_kept(model, batch_of(length)).total for length in (8, 9)}
    for length in (*range(10, 110), 8, 9, 8, 9, 8, 9):
        assert_same(step_of(model, batch_of(length), "fp32", length), step_of(stock, batch_of(length), "fp32", length))
        counts.append(count_of(model))
    assert max(counts) == max(counts[:20])
    assert {length: measure_kept(model, batch_of(length)).total for length in kept} == kept
    before = count_of(model)
    step_of(model, batch_of(8), "fp32", 8)
    assert count_of(model) == before, "what was used lately is remembered"


def test_what_is_used_is_remembered_and_goes_together(monkeypatch):
    monkeypatch.setattr(price, "MOST_FORWARDS", 4)
    decided = price.Decisions()
    for forward in range(1, 40):
        for question in range(5):
            decided[100 * forward + question] = price.YES
            assert decided[question] == (None if forward == 1 else price.NO)  # asked by every one
            decided[question] = price.NO
        decided.end_forward()
        known = {**decided.earlier, **decided}
        left = {key // 100 for key in known if key >= 100}
        assert left == {*range(max(1, min(left)), forward + 1)} and len(left) <= 8
        assert all(100 * one + question in known for one in left for question in range(5))


def test_what_a_forward_learned_goes_with_it(tapes):
    """A tensor that is held for long, such as a loss, must not hold what its tape knew."""
    held, model = [], build("bert", Size(layers=1))
    patch(model)
    held.append(model(**batch_for(model, Size()), output_hidden_states=True).hidden_states[-1].detach())
    assert tapes[-1].plan() is None


def test_a_tensor_that_is_kept_a_thousand_times_holds_few_dead_references():
    """Each one more took as long as there were before it."""
    x = torch.randn(4096, requires_grad=True)
    with saved_tensors_hooks(lambda t: t, lambda t: t), taping() as tape:
        y = x * 2
        for _ in range(1000):
            (y * y.detach()).sum()  # nobody differentiates it: its handles go at once
        record = tape.content_of(y)
        assert len(record.parts) <= 16
        kept = [y[i:] * y[i:].detach() for i in range(1000)]
        assert len(record.parts) <= 2 * len(kept) + 16
    assert sum(ref() is not None for ref in record.parts) >= len(kept) - 1  # the first is the record itself


def test_nodes_and_kept_tensors_that_are_gone_leave_no_references():
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    with taping() as tape:
        h = x @ w
        kept = h.exp().sum() * h.square()  # h itself is kept
        for number in range(1000):
            (torch.sin(h + number) * x).sum()
        record = tape.content_of(h)
        assert len(record.readers) <= 64 and len(record.remakes) <= 64
    del kept


def test_a_write_is_seen_by_a_forward_that_has_learned(device):
    """The first forwards never write; what they decided to remake from ``h`` must not be remade from what follows."""

    def forward(model, x):
        h = model.f(x)
        y = model.g(torch.sin(h))
        if not model.training:
            h = h.clone()
            y = y + model.h(h + 1) * h.mul_(2)
        return y

    x = torch.randn(8, WIDTH, device=device)
    torch.manual_seed(0)
    stock = Attack(forward).to(device)
    ours = copy.deepcopy(stock)
    patch(ours)
    for is_training in (True, False):
        stock.train(is_training)
        ours.train(is_training)
        for got, expected in zip(trained(ours, x, ENOUGH), trained(stock, x, ENOUGH), strict=True):
            assert_same(got, expected)


def test_a_forward_that_failed_teaches_nothing(tapes):
    def forward(model, x):
        y = torch.sin(model.f(x))
        if model.fails:
            raise ValueError
        return model.g(y)

    torch.manual_seed(0)
    model, x = Attack(forward), torch.randn(8, WIDTH)
    model.fails = True
    patch(model)
    for _ in range(ENOUGH):
        with pytest.raises(ValueError):
            model(x)
    assert price.UNASKED not in tapes[-1].decided.values()
    model.fails = False
    kept = measure_kept(model, x).total
    for _ in range(ENOUGH):
        model(x).sum().backward()
    assert measure_kept(model, x).total == kept


def test_what_a_sweep_finds_is_decided_at_once_the_next_time(tapes):
    def forward(model, x):
        h = model.f(x)
        y = model.g(h + 1)  # asked for before it is known that h is kept
        return y + torch.cos(h)

    torch.manual_seed(0)
    model, x = Attack(forward), torch.randn(8, WIDTH)
    patch(model)
    kept = [measure_kept(model, x).total for _ in range(ENOUGH)]
    assert len(set(kept)) == 1
    found = set(tapes[-1].decided.values())
    assert price.YES in found
    assert price.NO not in found


def test_a_checkpointed_block_that_is_called_in_two_ways_asks_again_what_it_asked(device):
    """What the other calls of a step teach must not change what backward runs again: gradients were silently wrong."""

    def block(self, x, is_other):
        a = self.f(x)
        b = self.f(a)
        y = a + 1
        return torch.sin(y) + torch.sin(b) if is_other else y + b

    def forward(model, x):
        for is_other in (True, False, False, False, False):
            x = model.block(x, is_other)
        return model.g(x)

    torch.manual_seed(0)
    stock, x = Attack(forward, block=Block(block)).to(device), torch.randn(8, WIDTH, device=device)
    stock.block.gradient_checkpointing = True
    stock.block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    ours = copy.deepcopy(stock)
    patch(ours)
    for got, expected in zip(trained(ours, x, ENOUGH), trained(stock, x, ENOUGH), strict=True):
        assert_same(got, expected)


def test_a_forward_that_goes_on_otherwise_keeps_no_more_than_stock(device):
    """What a sweep finds is decided at once only where that costs no more, should the sources not be kept after all."""

    def forward(model, x):
        a, b = model.f(x), model.g(x)
        y = torch.sin(a + b)  # asked for before it is known that a and b are kept, in training mode
        return y + torch.sin(a) + torch.sin(b) if model.training else y + a + b

    torch.manual_seed(0)
    stock, x = Attack(forward).to(device).train(), torch.randn(8, WIDTH, device=device)
    ours = copy.deepcopy(stock)
    patch(ours)
    for is_training in (True, True, False, True, False, False):
        ours.train(is_training)
        stock.train(is_training)
        assert measure_kept(ours, x).total <= measure_kept(stock, x).total


def test_what_was_decided_under_another_configuration_is_forgotten():
    """Else calls of which nobody asked under the one leave no records under the other, at the same place."""
    size = Size(hidden=64, heads=4, layers=3, batch=4, seq=64)
    base = build("llama", size)
    batch, kept = batch_for(base, size), []
    for configs in ([{"checkpoint": "o_proj"}], [True, {"checkpoint": "o_proj"}]):
        model = copy.deepcopy(base)
        for config in configs:
            patch(model, config, replace=True)
            for number in range(ENOUGH):
                step_of(model, batch, "fp32", number)
        kept.append(measure_kept(model, batch).total)
    assert kept[0] == kept[1]
