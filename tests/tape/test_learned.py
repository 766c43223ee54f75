"""What a forward need not record, as earlier ones have shown: nothing that is kept, or computed, changes by it."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hf_memsave import patch
from hf_memsave.count.kept import measure_kept
from hf_memsave.count.peak import count_peak
from support.attacks import WIDTH, Block, flat, pair, trained
from support.helpers import autocasting, taping
from support.lora import adapted
from support.steps import assert_same, patched_copy, step
from support.tapes import CALLS, references, remembered
from support.zoo import FAMILIES, MORE, Size, batch_for, build

ENOUGH = 5
#: Of each family, what autocast converts to.
LOW = {family: (None, torch.bfloat16)[i % 2] for i, family in enumerate(FAMILIES + MORE)}


@pytest.mark.parametrize("family", LOW)
def test_only_what_is_asked_for_is_recorded_and_as_much_is_kept(family, tapes, device):
    stock, low = build(family).to(device), LOW[family]
    model, batch = patched_copy(stock), batch_for(stock)
    first = kept_by(model, batch, low)
    for number in range(ENOUGH):
        assert_same(step(model, batch, number, low), step(stock, batch, number, low))
    *_, before, last = tapes
    assert len(last.made) == len(before.made) < len(tapes[0].made)
    assert set(last.made) <= last.used
    assert kept_by(model, batch, low) <= first


def kept_by(model, batch, low=None):
    with autocasting(model.device, low):
        return measure_kept(model, batch).total


@pytest.mark.parametrize("checkpoint", [None, "gate"])
@pytest.mark.parametrize("dropout", [0.0, 0.05])
@pytest.mark.parametrize("family", ["bert", "t5-encoder", "llama"])
def test_adapters_keep_as_much_in_every_step(family, dropout, checkpoint):
    """What a handler asks of how a tensor was made, it can ask in the next forward."""
    size = Size(hidden=64, layers=3, seq=64)
    model = adapted(family, "fp32", dropout, size)
    batch = batch_for(model, size)
    patch(model, checkpoint=checkpoint)
    kept = [measure_kept(model, batch).total for _ in range(ENOUGH)]
    assert len(set(kept)) == 1, kept


def branching(model, x):
    """In training mode it is not asked how ``y`` was made; else it is kept three times over."""
    y = torch.sin(model.f(x))
    return model.g(x + y) if model.training else model.g(x + y) * y + F.silu(y)


def writing_later(model, x):
    """The first forwards never write; what they remade from ``h`` must not be remade from what follows."""
    h = model.f(x)
    y = model.g(torch.sin(h))
    if not model.training:
        h = h.clone()
        y = y + model.h(h + 1) * h.mul_(2)
    return y


def write_before_the_question(model, x):
    h = model.f(x)
    y = torch.cat([h, h])
    if not model.training:
        h.mul_(2)
    return model.g(y)


def going_on_otherwise(model, x):
    """What a sweep finds in one forward says nothing of the next, in which the sources may not be kept after all."""
    a, b = model.f(x), model.g(x)
    y = torch.sin(a + b)  # asked for before it is known that a and b are kept, in training mode
    return y + torch.sin(a) + torch.sin(b) if model.training else y + a + b


FORWARDS = branching, writing_later, write_before_the_question, going_on_otherwise


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda fn: fn.__name__)
def test_another_forward_that_begins_alike_has_stocks_bits_and_keeps_no_more(forward, device):
    x = torch.randn(8, WIDTH, device=device)
    models = pair(forward, device)
    for is_training in (True, True, False, True, False, False):
        ours, stock = (measure_kept(model.train(is_training), x).total for model in models)
        assert ours <= stock
    for is_training in (True, False, True, False):
        assert_trained_alike(*(model.train(is_training) for model in models), x)


def assert_trained_alike(ours, stock, x):
    assert_same(*(flat(trained(model, x, ENOUGH)) for model in (ours, stock)))


def test_a_forward_that_calls_other_functions_keeps_what_it_would_have_kept_first():
    def forward(model, x):
        h = model.f(x)
        if model.is_other:
            return model.g(torch.sin(h)) + torch.cos(h)
        return model.g(x) + torch.exp(h).detach().mean() + h

    x, kept = torch.randn(8, WIDTH), []
    for before in (0, ENOUGH):
        model, _ = pair(forward, torch.device("cpu"), is_other=False)
        for _ in range(before):
            model(x).sum().backward()
        model.is_other = True
        kept.append(measure_kept(model, x).total)
    assert kept[0] == kept[1]


def test_a_step_that_was_seen_before_holds_no_more_than_it_needs():
    """A sum that nothing is made from again dies as in stock, though a dropout asks whether it is a conversion."""

    def forward(model, x):
        for _ in range(4):
            x = F.dropout(model.f(x) + model.g(x), 0.5, True)
        return x

    x, (model, stock) = torch.randn(256, WIDTH), pair(forward, torch.device("cpu"))
    first, *_, last = (count_peak(lambda: model(x).sum().backward()).peak for _ in range(ENOUGH))
    assert last < first and last <= count_peak(lambda: stock(x).sum().backward()).peak


def test_a_length_is_known_by_others_of_as_many_binary_digits(tapes, device):
    stock = build("llama").to(device)
    model = patched_copy(stock)
    for number, seq in enumerate((33, 40, 36, 41, 34, 38, 38)):
        batch = batch_for(model, Size(seq=seq))
        assert_same(step(model, batch, number), step(stock, batch, number))
    assert set(tapes[-1].made) <= tapes[-1].used
    assert len(tapes[-1].made) < len(tapes[0].made)


def test_a_length_that_takes_another_branch_is_not_taken_for_the_others():
    def forward(model, x):
        h = F.gelu(model.f(x))
        return model.g(h) if len(x) > 48 else h.sum()

    model, _ = pair(forward, torch.device("cpu"))
    for count in (40, 44, 41, 37):
        model(torch.randn(count, WIDTH)).sum().backward()
    x, (fresh, _) = torch.randn(60, WIDTH), pair(forward, torch.device("cpu"))
    for _ in range(ENOUGH):
        assert measure_kept(model, x).total == measure_kept(fresh, x).total
        model(x).sum().backward()


def test_calls_of_batches_of_other_lengths_are_forgotten(device, monkeypatch):
    """And learned again alike: as much is kept as before, with stock's bits."""
    monkeypatch.setattr(CALLS, "MOST_SIGNATURES", 2)
    stock = build("bert", Size(layers=1)).to(device)
    model, counts = patched_copy(stock), []
    batches = {length: batch_for(stock, replace(Size(), seq=length)) for length in range(8, 40)}
    kept = {length: kept_by(model, batches[length]) for length in (8, 9)}
    for length in (*range(10, 40), 8, 9, 8, 9, 8, 9):
        assert_same(step(model, batches[length]), step(stock, batches[length]))
        counts.append(remembered(model))
    assert max(counts) == max(counts[:24])
    assert {length: kept_by(model, batches[length]) for length in kept} == kept
    before = remembered(model)
    step(model, batches[8])
    assert remembered(model) == before, "what was used lately is remembered"


def test_blocks_that_train_later_keep_what_they_would_have_kept_from_the_start(device):
    """What was of no use while they were frozen is recorded once it is."""
    stock = build("bert").to(device)
    batch, kept = batch_for(stock), []
    for frozen_first in (False, True):
        model = patched_copy(stock)
        if frozen_first:
            model.bert.encoder.requires_grad_(False)
            for _ in range(ENOUGH):
                step(model, batch)
            model.bert.encoder.requires_grad_(True)
        step(model, batch)
        kept.append(kept_by(model, batch))
    assert kept[0] == kept[1]


def test_what_a_forward_learned_goes_with_it(tapes):
    """A tensor that is held for long, such as a loss, must not hold what its tape knew."""
    held, model = [], build("bert", Size(layers=1))
    patch(model)
    held.append(model(**batch_for(model, Size()), output_hidden_states=True).hidden_states[-1].detach())
    assert tapes[-1].calls() is None


def test_a_tensor_that_is_kept_or_read_hundreds_of_times_holds_few_dead_references():
    """Each one more took as long as there were before it."""
    x = torch.randn(4096, requires_grad=True)
    with saved_tensors_hooks(lambda t: t, lambda t: t), taping() as tape:
        y = x * 2
        for _ in range(400):
            (y * y.detach()).sum()  # it is not differentiated: its handles go at once
        assert len(references(tape, y)[0]) <= 16
        kept = [y[i:] * y[i:].detach() for i in range(400)]
        found = references(tape, y)[0]
        assert len(found) <= 2 * len(kept) + 16
    assert sum(ref() is not None for ref in found) >= len(kept) - 1  # the first is the content itself
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    with taping() as tape:
        h = x @ w
        kept = h.exp().sum() * h.square()  # h itself is kept
        for number in range(1000):
            (torch.sin(h + number) * x).sum()
        assert all(len(found) <= 64 for found in references(tape, h)[1:])


def test_a_forward_that_failed_teaches_nothing(tapes):
    def forward(model, x):
        y = torch.sin(model.f(x))
        if model.fails:
            raise ValueError
        return model.g(y)

    x, (model, _) = torch.randn(8, WIDTH), pair(forward, torch.device("cpu"), fails=True)
    for _ in range(ENOUGH):
        with pytest.raises(ValueError):
            model(x)
    assert not tapes[-1].known
    model.fails = False
    kept = measure_kept(model, x).total
    for _ in range(ENOUGH):
        model(x).sum().backward()
    assert measure_kept(model, x).total == kept


def test_what_others_keep_after_all_is_not_kept_twice():
    def first(model, x):
        h = model.f(x)
        y = model.g(h + 1)  # asked for before it is known that h is kept
        return y + torch.cos(h)

    def last(model, x):
        h = model.f(x)
        return torch.cos(h) + model.g(h + 1)

    x, models = torch.randn(8, WIDTH), [pair(forward, torch.device("cpu"))[0] for forward in (first, last)]
    kept = [measure_kept(model, x).total for model in models for _ in range(ENOUGH)]
    assert len(set(kept)) == 1


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

    checkpointed = Block(block)
    checkpointed.gradient_checkpointing = True
    checkpointed._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    assert_trained_alike(*pair(forward, device, block=checkpointed), torch.randn(8, WIDTH, device=device))


def test_what_was_learned_under_another_configuration_is_not_taken_for_this_one(tapes):
    """Else calls that one had no use for leave no records under the other, at the same place."""
    base, recorded = build("llama"), []
    for configs in ([{"loss": "stock"}], [{}, {"loss": "stock"}]):
        model = copy.deepcopy(base)
        for config in configs:
            patch(model, config, replace=True)
            found = []
            for _ in range(ENOUGH):
                step(model, batch_for(base))
                found.append(len(tapes[-1].made))
        recorded.append(found)
    assert recorded[0] == recorded[1] and recorded[0][0] > recorded[0][-1]
