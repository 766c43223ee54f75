"""What a forward need not record, as earlier ones have shown: nothing that is kept, or computed, changes by it."""

import copy

import pytest
import torch
import torch.nn.functional as F

from hf_memsave import patch
from hf_memsave.tape import Tape, prices
from hf_memsave.tape.meter import measure_kept
from support.attacks import WIDTH, Attack, trained
from support.families import FAMILIES, MORE, Size, batch_for, build
from support.steps import assert_same

ENOUGH = 5


@pytest.fixture
def tapes(monkeypatch):
    """Every tape that is laid, in order."""
    found, enter = [], Tape.__enter__

    def noted(tape):
        found.append(tape)
        return enter(tape)

    monkeypatch.setattr(Tape, "__enter__", noted)
    return found


@pytest.mark.parametrize("family", FAMILIES + MORE)
def test_only_what_is_asked_for_is_recorded_and_as_much_is_kept(family, tapes, device):
    model = build(family, Size(), dropout=0.1).to(device)
    patch(model)
    batch = batch_for(model, Size())
    first = measure_kept(model, batch).total
    for _ in range(ENOUGH):
        model(**batch).loss.backward()
    *_, before, last = tapes
    assert len(last.made) == len(before.made) < len(tapes[0].made)
    assert set(last.made) <= last.asked
    assert measure_kept(model, batch).total <= first


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
    assert prices.UNASKED not in tapes[-1].decided.values()
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
    decisions = set(tapes[-1].decided.values())
    assert prices.YES in decisions
    assert prices.NO not in decisions
