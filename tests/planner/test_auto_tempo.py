"""Auto-Tempo: what it finds fits, and is the least that does; nothing in a model changes but what it converts."""

import contextlib
import dataclasses
import random

import numpy
import pytest
import torch

from hf_memsave import MemSaveConfig, unpatch
from hf_memsave.arch.versions import enable_checkpointing
from hf_memsave.config.config import KINDS
from hf_memsave.errors import PlanError
from hf_memsave.patching.swap import patched_models, stock_class
from hf_memsave.planner import fast, smart
from hf_memsave.planner.trial import resized
from support.helpers import halved
from support.planning import EPS, EXACT, SIZE, bert, between, fixed, needs, norms, once
from support.steps import assert_same, patched, patched_classes, state_of, step
from support.zoo import batch_for, build


def gpt2(device):
    return build("gpt2", SIZE, attn_implementation="eager").to(device)


@pytest.fixture
def made(device):
    return (model := bert(device)), batch_for(model, SIZE)


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "share", "config"),
    [(bert, 0.02, "tempo"), (bert, 0.35, "tempo"), (bert, 0.8, EXACT), (gpt2, 0.35, "tempo")],
    ids=["all", "some", "few", "gpt2"],
)
def test_smart_finds_the_least_that_fits(make, share, config, device):
    model, batch = (model := make(device)), batch_for(model, SIZE)
    limit = between(model, batch, share, config)
    plan = smart(model, batch, config, limit, timer=once)
    assert plan.config is not None and plan.report.config == plan.config and patched_classes(model)
    assert needs(model, batch, plan.config) <= limit < needs(model, batch)
    layers = dict(plan.config.layers)
    assert set(layers) == {"activation", "norm", "dropout", "attention"} and any(layers.values())
    for kind, number in layers.items():
        if number and sum(layers.values()) > 1:
            fewer = dataclasses.replace(plan.config, layers=layers | {kind: number - 1})
            assert needs(model, batch, fewer) > limit
    assert MemSaveConfig.resolve(config) == dataclasses.replace(plan.config, layers=None)


@pytest.mark.long
def test_what_is_needed_is_counted(made):
    model, batch = made
    model.bert.embeddings.requires_grad_(False)
    plan = smart(model, batch, "tempo", memory=between(model, batch, 0.5), timer=once)
    stock, everything = plan.trials[:2]
    assert (stock.name, stock.batch_size, stock.needed) == ("nothing", 4, needs(model, batch))
    assert (everything.name, everything.needed) == ("everything", needs(model, batch, "tempo"))
    assert stock.needed - stock.kept == fixed(model) < fixed(bert())
    unpatch(model)
    again = smart(model, batch, "tempo", memory=stock.needed - 1, optimizer_bytes=0, timer=once)
    assert again.config is None and again.trials[0].needed < stock.needed


@pytest.mark.parametrize("kind", ["activation", "norm", "dropout"])
def test_smart_with_one_kind(kind, made):
    config = MemSaveConfig(**{other: "stock" for other in KINDS if other != kind})
    plan = smart(*made, config, between(*made, 0.5, config), timer=once)
    assert plan.config.layers == ((kind, 2),)
    assert all(trial.seconds is None for trial in plan.trials)  # nothing to choose between


@pytest.mark.long
@pytest.mark.parametrize("cheap", ["activation", "norm", "dropout"])
def test_smart_converts_first_what_costs_least(cheap, made):
    model, batch = made

    def timer(run):
        run()
        layers = [dict(config.layers) for _, config in patched_models(model)]
        return 1.0 + sum(number for found in layers for kind, number in found.items() if kind != cheap)

    limit = needs(model, batch, MemSaveConfig(layers=dict.fromkeys(KINDS, 0) | {cheap: 3}))
    plan = smart(model, batch, EXACT, limit, timer=timer)
    assert dict(plan.config.layers) == dict.fromkeys(KINDS[:-1], 0) | {cheap: 3}


def test_smart_converts_no_more_than_its_config_says(made):
    config = MemSaveConfig(layers={"norm": 2, "activation": 1, "attention": 0})
    plan = smart(*made, config, between(*made, 0, config), timer=once)
    assert dict(plan.config.layers) == {"norm": 2, "activation": 1, "attention": 0, "dropout": SIZE.layers}


def test_what_fits_stays_stock_and_what_cannot_fit_is_an_error_with_figures(made):
    model, batch = made
    before, stock, least = state_of(model), needs(model, batch), needs(model, batch, "tempo")
    plan = smart(model, batch, "tempo", memory=stock, timer=once)
    assert (plan.config, plan.report, len(plan.trials)) == (None, None, 1)
    assert "stays stock" in plan.reason and state_of(model) == before
    with pytest.raises(PlanError, match=r"batch of 4 does not fit: expected at most .* MiB, got .*stock .*smaller bat"):
        smart(model, batch, "tempo", memory=least - 1, timer=once)
    with pytest.raises(PlanError, match=r"not one sequence fits .*expected at most .* Use shorter sequences"):
        fast(model, batch, "tempo", memory=fixed(model), timer=once)
    assert state_of(model) == before


def sizes_of(model, seen):
    return lambda **inputs: (seen.append(len(inputs["input_ids"])), model(**inputs))[1]


@pytest.mark.parametrize(("size", "room", "pays"), [(4, 6, False), (1, 7, True), (3, 5, True), (9, 2, True)])
def test_fast_finds_the_largest_batches_and_decides_by_sequences_a_second(size, room, pays, made, device):
    (model, batch), seen = made, []

    def timer(run):
        run()
        return 1.0 if pays else float(seen[-1]) ** 2

    before, limit = state_of(model), needs(model, resized(batch, room))
    plan = fast(model, resized(batch, size), "tempo", memory=limit, forward=sizes_of(model, seen), timer=timer)
    assert (plan.config is not None) == pays and ("everything is converted" in plan.reason) == pays
    largest = {trial.name: trial.batch_size for trial in plan.trials if trial.seconds is not None}
    most = largest["everything"]
    assert largest["nothing"] == room < most and plan.batch_size == (most if pays else room)
    if pays:
        assert plan.config == MemSaveConfig.preset("tempo")
        assert patched_classes(model) == patched_classes(patched(bert(device), "tempo"))
    else:
        assert state_of(model) == before
    unpatch(model)
    assert needs(model, resized(batch, room + 1)) > limit
    assert needs(model, resized(batch, most), "tempo") <= limit < needs(model, resized(batch, most + 1), "tempo")


@pytest.mark.parametrize("most", [1, 5])
def test_fast_tries_no_larger_batch_than_it_may_and_none_twice(most, made):
    (model, batch), seen = made, []
    forward = sizes_of(model, seen)
    plan = fast(model, batch, "tempo", "1GiB", forward=forward, max_batch=most, timer=once)
    assert max(seen) == plan.batch_size == most and plan.config is None and "no more sequences fit" in plan.reason
    tried = [(t.name, t.batch_size) for t in plan.trials]
    assert len(set(tried)) == len(tried) and tried[-1] == ("everything", most)


def test_a_batch_that_needs_no_more_memory_the_larger_it_is_is_refused(made):
    model, batch = made[0], {name: value[:1] for name, value in made[1].items()}
    with pytest.raises(PlanError, match=r"expected a batch of \d+ to need more than one of \d+, .*loss depends on"):
        fast(model, resized(batch, 4), "tempo", "1GiB", forward=lambda **_: model(**batch), timer=once)


#: What a full device says: CUDA's, the CPU's (a real one), Python's.
FULL = {
    "cuda": lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")),
    "cpu": lambda: torch.empty(2**50),
    "python": lambda: (_ for _ in ()).throw(MemoryError),
}


@pytest.mark.parametrize(("room", "full"), [(0, "cuda"), (1, "cpu"), (5, "cuda"), (5, "python")])
def test_fast_takes_a_full_device_for_too_large_a_batch_and_smart_for_an_error(room, full):
    model = bert()

    def forward(**inputs):
        if len(inputs["input_ids"]) > (room if not patched_classes(model) else 2 * room):
            FULL[full]()
        return model(**inputs)

    options = dict(memory="1GiB", forward=forward, timer=once)
    if room < 4:
        with pytest.raises(PlanError, match="the device ran out of memory on 4 sequences, .*smaller limit, or a small"):
            smart(model, batch_for(model, SIZE), "tempo", **options)
    with contextlib.nullcontext() if room else pytest.raises(PlanError, match="not one sequence fits"):
        plan = fast(model, batch_for(model, SIZE), "tempo", **options)
        assert plan.config == MemSaveConfig.preset("tempo") and plan.batch_size == 2 * room


def test_a_larger_batch_repeats_the_sequences():
    batch = {"input_ids": torch.arange(6).reshape(3, 2), "scale": torch.tensor(2.0), "use_cache": False}
    larger = resized(batch, 7)
    assert larger["input_ids"][:, 0].tolist() == [0, 2, 4, 0, 2, 4, 0]
    assert (larger["scale"], larger["use_cache"]) == (2.0, False)
    assert torch.equal(resized(batch, 2)["input_ids"], batch["input_ids"][:2])


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
    assert (faults >= 2 or where is None) and plan.config is not None and {norm.eps for norm in norms(model)} == {EPS}
    snapshot.check(is_stock=False)


def test_a_patched_model_is_refused_and_so_is_reentrant_checkpointing(made, device):
    model, batch = patched(made[0], {"norm": "stock"}), made[1]
    classes, before = patched_classes(model), state_of(model)
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


def test_an_exact_plan_trains_like_stock(made):
    model, batch = made
    stock = step(model.train(), batch)
    plan = smart(model, batch, EXACT, between(model, batch, 0.4, EXACT))
    assert min(dict(plan.config.layers).values()) < SIZE.layers
    timed = [t.seconds for t in plan.trials if t.seconds is not None]
    assert timed and min(timed) > 0
    assert_same(step(model, batch), stock)
