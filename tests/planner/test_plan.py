"""The planner: the cheapest exact setting that fits, found without a device, and true of a real step."""

import copy
import itertools
import re
from dataclasses import replace

import pytest
import torch

import hf_memsave
from hf_memsave import WTACRS, MemSaveConfig, MemSaveError
from hf_memsave.config.sizes import both
from hf_memsave.count.peak import Count
from hf_memsave.errors import MeasureError, PlanError
from hf_memsave.measure.depth import trace_in_full
from hf_memsave.measure.estimate import estimate
from hf_memsave.measure.figures import CONTEXT, WORKSPACES
from hf_memsave.measure.lora import Lora
from hf_memsave.measure.training import Training, build, trace_at
from hf_memsave.planner.plan import plan
from hf_memsave.tape import offload
from hf_memsave.tape.offload import Away
from support.helpers import MATRIX, halved, on_stand_in
from support.steps import patched, step
from support.zoo import Size, batch_for, config_of

pytestmark = [pytest.mark.long, on_stand_in]

LAYERS = 5
SIZE = Size(hidden=128, layers=LAYERS, batch=8, seq=128)
CONFIGS = {family: config_of(family, SIZE) for family in ("bert", "llama")}
STEP = dict(batch_size=8, seq_len=128, optimizer="sgd")
#: So many layers, and so few gradients, that a step needs least where what it keeps is offloaded.
DEEP = {family: config_of(family, replace(SIZE, layers=24)) for family in CONFIGS}
ADAPTED = STEP | {"lora": Lora(r=4, dtype="model")}
#: A budget, as a part of what the floor needs above what is needed with blocks run again -> what is planned for it.
WAYS = {0.4: "rungs", -0.0125: "offload"}


@pytest.fixture(autouse=True)
def few_on_their_way(monkeypatch):
    """Of models whose layers are a thousandth of those that are trained."""
    monkeypatch.setattr(offload, "IN_FLIGHT", 2**19)
    monkeypatch.setattr("hf_memsave.measure.depth._KNOWN", {})


def budget_of(config, share, **fields):
    floor, least = (estimate(config, memsave={"checkpoint": c}, **fields).patched.needed for c in (None, "block"))
    return int(least + share * (floor - least))


def test_what_fits_at_the_floor_costs_nothing_and_nothing_is_traced_again(monkeypatch):
    config = CONFIGS["llama"]
    found = plan(config, budget=budget_of(config, 1, **STEP), **STEP)
    assert found.config == MemSaveConfig() and found.best.cost == 0
    assert [one.config.checkpoint for one in found.tried] == [None, "gate", "block"]
    budget = budget_of(config, 1, holds_output=True, **STEP)
    held = plan(config, budget=budget, holds_output=True, **STEP)  # of the step before, whose work is not this one's
    assert [one.cost for one in held.tried] == [one.cost for one in found.tried]
    monkeypatch.setattr("hf_memsave.measure.depth.trace_at", None)
    assert plan(copy.deepcopy(config), budget=found.budget, **STEP).best == found.best
    rungs = 'checkpoint="gate": attention and outputs of experts are kept, everything else of a block runs again.'
    assert rungs in str(found)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_where_stock_fits_nothing_is_needed_and_nothing_else_is_traced(checkpointing, monkeypatch):
    """By the step as it is, under gradient checkpointing too; a byte less, and it is no longer stock."""
    step, config = STEP | {"checkpointing": checkpointing}, CONFIGS["llama"]
    stock = estimate(config, memsave=False, **step).stock.needed
    less = plan(config, budget=stock - 1, **step)
    assert less.config is not None and "Stock fits" not in str(less)
    monkeypatch.setattr("hf_memsave.measure.depth.trace_at", None)
    found = plan(config, budget=stock, **step)
    assert (found.config, found.best.needed, found.best.name, found.tried) == (None, stock, "stock", ())
    assert f"Stock fits in {both(stock)}: you need nothing." in str(found) and "The cheapest" not in str(found)
    name = "stock, gradient checkpointing" if checkpointing else "stock"
    assert re.search(rf"^{name} +\S+ MiB +[\d.]+% +the best$", str(found), re.MULTILINE)


@pytest.mark.parametrize("family", ["llama", pytest.param("bert", marks=MATRIX)])
def test_it_finds_what_brute_force_finds(family):
    """Of all settings, each traced by itself at full depth, none that fits runs fewer products."""
    config, settings = CONFIGS[family], [None, MemSaveConfig()]
    for rung, layers in itertools.product(("gate", "block"), range(1, LAYERS + 1)):
        settings.append(MemSaveConfig(checkpoint=rung, layers={"checkpoint": layers}))
    depth = {"num_hidden_layers": LAYERS}
    stock, *traces = (trace_at(config, depth, Training(**STEP), memsave) for memsave in settings)
    flops = {memsave: trace.flops for memsave, trace in zip(settings[1:], traces, strict=True)}
    needs = {m: trace.peak + CONTEXT + WORKSPACES for m, trace in zip(settings[1:], traces, strict=True)}
    least, most = min(needs.values()), max(needs.values())
    for share in (0.05, 0.3, 0.8):
        budget = int(least + share * (most - least))
        found = plan(config, budget=budget, **STEP)
        assert found.best.needed == pytest.approx(needs[found.config], rel=0.005) and found.best.needed <= budget
        assert found.best.cost == pytest.approx(flops[found.config] / stock.flops - 1, abs=1e-4)
        assert all(needs[m] > 0.995 * budget for m in needs if flops[m] < flops[found.config])


@pytest.mark.parametrize("layers", [1, 3, 6])
def test_a_rung_in_some_layers_of_adapters_needs_what_a_whole_trace_of_it_does(layers):
    """The first layer wants no gradient of its input, and runs less again."""
    config, of = config_of("llama", replace(SIZE, layers=8)), {"lora": Lora(r=4), "batch_size": 8, "seq_len": 128}
    memsave = MemSaveConfig(checkpoint="gate", layers={"checkpoint": layers})
    stock, own = (trace_at(config, {}, Training(**of), one) for one in (None, memsave))
    assert estimate(config, memsave=memsave, **of).patched.peak == own.peak
    found = plan(config, budget=own.peak + CONTEXT + WORKSPACES, **of)
    assert (found.config, found.best.needed) == (memsave, own.peak + CONTEXT + WORKSPACES)
    assert found.best.cost == pytest.approx(own.flops / stock.flops - 1, abs=1e-6)


class Device(Count):
    """Counts what is not in main memory, which on CPU is what offload has copied."""

    def note(self, call):
        self.timeline.append((str(call.func), self.live - Away.total))


@pytest.mark.parametrize(("family", "share"), halved(DEEP, WAYS))
def test_a_real_step_stays_within_the_budget(family, share, monkeypatch):
    """Counted in a step on CPU, storage by storage; what a CPU keeps for itself differs by a few percent."""
    monkeypatch.setattr(offload, "SMALLEST_NBYTES", 2**12)
    config = DEEP[family]
    budget = budget_of(config, share, **ADAPTED)
    found = plan(config, budget=budget, **ADAPTED)
    assert found.config.offload == (WAYS[share] == "offload")
    torch.manual_seed(0)
    model = patched(build(config, Training(**ADAPTED)).to(torch.bfloat16), found.config)
    step(model, batch_for(model, replace(SIZE, batch=1, seq=8)))
    model.zero_grad()
    batch = batch_for(model, SIZE)
    del batch["attention_mask"]
    with Device() as count:
        model(**batch).loss.backward()
    count.made.clear()
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert max(live for _, live in count.timeline) + weights <= 1.03 * (budget - CONTEXT - WORKSPACES)


@pytest.mark.parametrize("family", DEEP)
def test_a_larger_budget_never_costs_more_and_offload_comes_last_and_is_bounded(family):
    config = DEEP[family]
    costs = [plan(config, budget=budget_of(config, x, **ADAPTED), **ADAPTED).best.cost for x in (0.02, 0.3, 0.6, 1.0)]
    assert costs == sorted(costs, reverse=True)
    shown = plan(config, budget=budget_of(config, 0.3, **ADAPTED), **ADAPTED)
    assert not shown.config.offload and shown.fitting[-1].config.offload
    budget = budget_of(config, min(WAYS), **ADAPTED)
    assert plan(config, budget=budget, **ADAPTED).best.away > 0
    with pytest.raises(PlanError, match="nothing fits"):
        plan(config, budget=budget, main_memory=1, **ADAPTED)


def test_too_small_a_budget_is_an_error_by_how_much_and_what_would_fit():
    budget = CONTEXT + WORKSPACES + 9 * 2**20
    with pytest.raises(PlanError, match=r"nothing fits: .* with .*: .* too much\. What fits: ") as caught:
        hf_memsave.plan(CONFIGS["llama"], budget=budget, **STEP)
    for name, number in re.findall(r"(batch_size|seq_len)=(\d+)", str(caught.value)):
        assert plan(CONFIGS["llama"], budget=budget, **STEP | {name: int(number)}).best.needed <= budget
    for devices in re.findall(r"over (\d+) devices", str(caught.value)):
        sharded = plan(CONFIGS["llama"], budget=budget, sharding="fsdp", devices=int(devices), **STEP)
        assert sharded.best.needed <= budget


@pytest.mark.parametrize(("argument", "message"), [
    *(({"budget": b}, "expected bytes, or a text such as '16GiB'") for b in ("24", "much", 0, -1, None, 1.5)),
    ({"memsave": False}, "expected what to begin with, got False"),
    ({"budget": "100MiB"}, r"too much\. Not one sequence of 8 tokens fits"),
])  # fmt: skip
def test_arguments_are_checked(argument, message):
    with pytest.raises(MemSaveError, match=message):
        plan(CONFIGS["llama"], **{"budget": "1GiB"} | STEP | argument)


def test_a_plan_begins_with_what_was_asked_for_and_needs_layers_that_are_alike(monkeypatch):
    monkeypatch.setattr("hf_memsave.planner.plan.ROWS", 64)
    rungs, sampled = [None, "gate", "block", "tiles"], [None, "block"]  # of rows that are drawn, no product runs again
    compiled = {"compile": True}, rungs[:3]
    budget = estimate(CONFIGS["llama"], memsave=False, **STEP).stock.needed - 1
    for asked, tried in (
        ({"tiles": 32}, rungs),
        ({"storage": "int4"}, rungs[:3]),
        ({"linear": WTACRS()}, sampled),
        compiled,
    ):
        found = plan(CONFIGS["llama"], budget=budget, memsave=asked, **STEP)
        assert [one.config.checkpoint for one in found.tried] == tried
        assert found.tried[-1].config == MemSaveConfig(checkpoint=tried[-1], layers={"checkpoint": LAYERS}, **asked)
    begun = plan(CONFIGS["llama"], budget=budget, memsave={"dropout": "mask", "layers": {"norm": 2}}, **STEP)
    assert begun.config == MemSaveConfig(dropout="mask", layers={"norm": 2})
    with pytest.raises(MeasureError, match="a plan needs a text model whose layers are alike"):
        plan("resnet", budget="24GiB", batch_size=2, seq_len=16)


@pytest.mark.parametrize("layers", [9, *(pytest.param(n, marks=MATRIX) for n in (8, 11))])
@pytest.mark.parametrize("changes", [{"lora": Lora(), "quantized": "nf4"}, {"autocast": torch.bfloat16}], ids=str)
def test_where_fp32_sums_run_beside_16_bits_a_deep_model_keeps_what_a_plan_says(changes, layers):
    config = config_of("llama", replace(SIZE, layers=layers))
    of = config, {"num_hidden_layers": layers}, Training(batch_size=4, seq_len=128, **changes), MemSaveConfig()
    told, own = trace_in_full(*of), trace_at(*of)
    assert (told.peak, told.at_loss) == (own.peak, own.at_loss)
