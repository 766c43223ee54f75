"""The planner: the cheapest exact setting that fits, found without a device, and true of a real step."""

import copy
import itertools
import re
from dataclasses import replace

import pytest
import torch

import hf_memsave
from hf_memsave import MemSaveConfig, MemSaveError, patch
from hf_memsave.count.peak import Count
from hf_memsave.errors import PlanError
from hf_memsave.measure.estimate import CONTEXT, WORKSPACES, estimate
from hf_memsave.measure.lora import Lora
from hf_memsave.measure.training import Training, build, trace_at
from hf_memsave.planner import rates as planner_rates
from hf_memsave.planner.plan import plan
from hf_memsave.planner.rates import Rates, rates_of, work_of
from hf_memsave.planner.settings import RUNGS, trace_of
from hf_memsave.tape import offload
from hf_memsave.tape.offload import Away
from support.helpers import MATRIX, halved, on_stand_in
from support.steps import step
from support.zoo import Size, batch_for, config_of

pytestmark = [
    on_stand_in,
]

LAYERS = 5
SIZE = Size(hidden=128, layers=LAYERS, batch=8, seq=128)
CONFIGS = {family: config_of(family, SIZE) for family in ("bert", "llama")}
STEP = dict(batch_size=8, seq_len=128, optimizer="sgd")
STEPS = Training(**STEP)
#: Bytes that may be on their way, of models whose layers are a thousandth of those that are trained.
IN_FLIGHT = 2**19


@pytest.fixture(autouse=True)
def few_on_their_way(monkeypatch):
    monkeypatch.setattr(planner_rates, "IN_FLIGHT", IN_FLIGHT)


def needed(config, memsave):
    return estimate(config, **STEP, memsave=memsave).patched.needed


@pytest.fixture(scope="module", params=CONFIGS)
def ends(request):
    """A configuration, and what its step needs at the floor, up to the gate, and with whole blocks run again."""
    config = CONFIGS[request.param]
    return config, [needed(config, MemSaveConfig(checkpoint=rung)) for rung in (None, "gate", "block")]


@pytest.mark.long
def test_what_fits_at_the_floor_costs_nothing_and_nothing_is_traced_again(ends, monkeypatch):
    config, (floor, *_) = ends
    found = plan(config, budget=floor, **STEP)
    assert found.config == MemSaveConfig() and found.best.cost == 0 and len(found.tried) == len(RUNGS)
    monkeypatch.setattr("hf_memsave.measure.depth.trace_at", None)
    again = plan(copy.deepcopy(config), budget="24GiB", **STEP)
    assert again.best == found.best
    assert "The cheapest in 24.00 GiB (25.8 GB): no product runs again" in str(again)
    monkeypatch.undo()
    begun = plan(config, budget="24GiB", memsave={"dropout": "mask", "layers": {"norm": 2}}, **STEP)
    assert begun.config == MemSaveConfig(dropout="mask", layers={"norm": 2})


def traced(config, depth=LAYERS, **memsave):
    """The peak of a setting's own step, traced at full depth: no mixture of others."""
    return trace_at(config, {"num_hidden_layers": depth}, STEPS, MemSaveConfig(**memsave), keeps=False).peak


def counted_away(config, rung):
    """The bytes that another layer moves to main memory."""
    moved = [Away.moved]
    for layers in (LAYERS, LAYERS + 1):
        traced(config, layers, offload=True, checkpoint=rung)
        moved.append(Away.moved)
    return moved[2] - 2 * moved[1] + moved[0]


@pytest.fixture(scope="module", params=["llama", pytest.param("bert", marks=MATRIX)])
def of_every_setting(request):
    """What each setting needs, by its config; and what a layer offloads at each rung."""
    config, needs = CONFIGS[request.param], {}
    for is_away, rung in itertools.product((False, True), RUNGS):
        for layers in range(1, LAYERS + 1) if rung else (0,):
            of = dict(offload=is_away, checkpoint=rung, layers={"checkpoint": layers} if rung else None)
            needs[MemSaveConfig(**of)] = traced(config, **of) + CONTEXT + WORKSPACES
    return config, needs, {rung: counted_away(config, rung) for rung in RUNGS}


#: Of a device that computes so slowly, or moves so little, that one of the two is always the cheaper way.
FAST_BUS = Rates(flops=1e12, memory=1e15, bus=1e15)
SLOW_BUS = Rates(flops=1e15, memory=1e15, bus=1e3)


@pytest.mark.long
@pytest.mark.parametrize(("rates", "share"), halved([FAST_BUS, SLOW_BUS, "a100"], [0.05, 0.3, 0.8]))
def test_it_finds_what_brute_force_finds(of_every_setting, share, rates):
    """Of all settings, each traced by itself, none that fits costs less."""
    config, needs, away_of = of_every_setting
    held = {memsave: held_of(config, away_between(memsave, away_of)) for memsave in needs}
    needs = {memsave: need + held[memsave] for memsave, need in needs.items()}
    budget = int(min(needs.values()) + share * (needs[MemSaveConfig()] - min(needs.values())))
    found = plan(config, budget=budget, rates=rates, **STEP)
    assert needs[found.config] == pytest.approx(found.best.needed, rel=0.005)
    assert needs[found.config] <= 1.005 * budget
    costs = costs_of(config, needs, away_of, rates)
    assert found.best.cost == pytest.approx(costs[found.config], rel=1e-6)
    cheaper = [memsave for memsave, cost in costs.items() if cost < found.best.cost * (1 - 1e-9)]
    assert all(needs[memsave] > 0.995 * budget for memsave in cheaper)


def away_between(memsave, away_of):
    """What is packed by forward and let go of by backward."""
    layers = dict(memsave.layers or ()).get("checkpoint", 0)
    return layers * away_of[memsave.checkpoint] + (LAYERS - layers) * away_of[None] if memsave.offload else 0


def held_of(config, away):
    """Of that, what may be on the device as forward ends: two of the MLP's width, or what may be on its way."""
    one = STEP["batch_size"] * STEP["seq_len"] * config.intermediate_size * 2
    return min(away, max(2 * one, IN_FLIGHT))


def costs_of(config, settings, away_of, rates):
    """By the formula, in full: what runs again, and what the bus takes longer than the products."""
    rates, work = rates_of(rates), work_of(config, STEPS)
    found = {}
    for memsave in settings:
        layers = dict(memsave.layers or ()).get("checkpoint", 0)
        again = layers * work.again[memsave.checkpoint] if layers else 0
        away = away_between(memsave, away_of)
        away -= held_of(config, away)
        forward, backward = work.forward / rates.flops, (work.backward + again) / rates.flops
        waits = max(0, away / rates.bus - forward) + max(0, away / rates.bus - backward)
        more = again / rates.flops + waits + 2 * away / rates.memory
        found[memsave] = more / ((work.forward + work.backward) / rates.flops)
    return found


#: Which settings are planned, by what the device does.
WAYS = {"rungs": SLOW_BUS, "offload": FAST_BUS}


@pytest.mark.long
@pytest.mark.parametrize(("family", "way"), halved(CONFIGS, WAYS))
@pytest.mark.parametrize("share", [0.4, *(pytest.param(x, marks=pytest.mark.matrix) for x in (0.1, 0.9))])
def test_a_real_step_stays_within_the_budget(family, share, way, monkeypatch):
    """Counted in a step on CPU, storage by storage; what a CPU keeps for itself differs by a few percent."""
    monkeypatch.setattr(offload, "SMALLEST_NBYTES", 2**12)
    config = CONFIGS[family]
    floor, least = (needed(config, MemSaveConfig(checkpoint=rung)) for rung in (None, "block"))
    budget = int(least + share * (floor - least))
    found = plan(config, budget=budget, rates=WAYS[way], **STEP)
    assert found.config.offload == (way == "offload")
    torch.manual_seed(0)
    model = build(config, STEPS).to(torch.bfloat16)
    patch(model, found.config)
    step(model, batch_for(model, replace(SIZE, batch=1, seq=8)))
    model.zero_grad()
    batch = batch_for(model, SIZE)
    del batch["attention_mask"]
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    peak = peak_on_the_device(lambda: model(**batch).loss.backward())
    assert peak + weights <= 1.03 * (budget - CONTEXT - WORKSPACES)


class Device(Count):
    """Counts what is not in main memory, which on CPU is what offload has copied."""

    def note(self, func, args):
        self.timeline.append((str(func), self.live - Away.total))


def peak_on_the_device(run):
    with Device() as count:
        run()
    count.made.clear()
    return max(live for _, live in count.timeline)


@pytest.mark.long
def test_main_memory_bounds_what_is_offloaded_and_a_larger_budget_never_costs_more(ends):
    config, (floor, _, least) = ends
    costs = [plan(config, budget=int(least + x * (floor - least)), **STEP).best.cost for x in (0.02, 0.3, 0.6, 1.0)]
    assert costs == sorted(costs, reverse=True)
    budget = int(least + 0.5 * (floor - least))
    free = plan(config, budget=budget, rates=FAST_BUS, **STEP)
    assert free.best.away > 0
    bound = plan(config, budget=budget, rates=FAST_BUS, main_memory=free.best.away // 2, **STEP)
    assert bound.best.away <= free.best.away // 2
    assert bound.best.cost >= free.best.cost


@pytest.mark.long
def test_too_small_a_budget_is_an_error_by_how_much_and_what_would_fit():
    budget = CONTEXT + WORKSPACES + 9 * 2**20
    with pytest.raises(PlanError, match=r"nothing fits: .* which is .* too much\. What fits: ") as caught:
        hf_memsave.plan(CONFIGS["llama"], budget=budget, **STEP)
    for name, number in re.findall(r"(batch_size|seq_len)=(\d+)", str(caught.value)):
        assert plan(CONFIGS["llama"], budget=budget, **STEP | {name: int(number)}).best.needed <= budget
    for devices in re.findall(r"over (\d+) devices", str(caught.value)):
        sharded = plan(CONFIGS["llama"], budget=budget, sharding="fsdp", devices=int(devices), **STEP)
        assert sharded.best.needed <= budget


@pytest.mark.long
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        *(({"budget": b}, "expected bytes, or a text such as '16GiB'") for b in ("24", "much", 0, -1, None, 1.5)),
        ({"rates": "abacus"}, "rates: expected one of a100, .*got 'abacus'"),
        ({"memsave": False}, "expected what to begin with, got False"),
        ({"budget": "100MiB"}, r"too much\. Not one sequence of 8 tokens fits"),
    ],
)
def test_arguments_are_checked(argument, message):
    with pytest.raises(MemSaveError, match=message):
        plan(CONFIGS["llama"], **{"budget": "1GiB"} | STEP | argument)
    for field in ("flops", "memory", "bus"):
        with pytest.raises(PlanError, match=f"Rates.{field}: expected a number above 0, got 0"):
            Rates(**{"flops": 1, "memory": 1, "bus": 1} | {field: 0})


@pytest.mark.long
@pytest.mark.parametrize("layers", [9, *(pytest.param(n, marks=MATRIX) for n in (8, 11))])
@pytest.mark.parametrize("changes", [{"lora": Lora(), "quantized": "nf4"}, {"autocast": torch.bfloat16}], ids=str)
def test_where_fp32_sums_run_beside_16_bits_a_deep_model_keeps_what_a_plan_says(changes, layers):
    config = config_of("llama", replace(SIZE, layers=layers))
    training = Training(batch_size=4, seq_len=128, **changes)
    told = trace_of(config, training, MemSaveConfig()).trace
    own = trace_at(config, {"num_hidden_layers": layers}, training, MemSaveConfig(), keeps=False)
    assert (told.peak, told.at_loss) == (own.peak, own.at_loss)
