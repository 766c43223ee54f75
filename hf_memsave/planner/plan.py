"""The cheapest setting whose step fits a budget, found without a GPU; or what would fit.

Settings are a list: a rung of ``checkpoint`` in the first 1, 2, ... layers, or none. What each takes follows from two
traced steps, with the rung in no layer and in all: bytes at the peak, and the operations that it adds to stock's. Of
those that fit, the one that adds the fewest wins. Offload adds none; how fast its bytes move is in no trace, so that it
comes after those that fit without.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedConfig

from hf_memsave.config.config import MemSaveConfig, MemSaveLike
from hf_memsave.config.lora import Lora
from hf_memsave.config.sizes import both, bytes_of, counted, gib, html_table
from hf_memsave.errors import MeasureError, PlanError
from hf_memsave.measure.depth import trace_in_full, with_depth
from hf_memsave.measure.estimate import OWN, sharded
from hf_memsave.measure.fake_device import without_gpus
from hf_memsave.measure.largest import largest_of
from hf_memsave.measure.trace import Place, Trace
from hf_memsave.measure.training import Training, config_of, training_of
from hf_memsave.patching.rows import ROWS


class Family(NamedTuple):
    """Settings that differ in their number of layers alone; those without a rung are one."""

    offload: bool
    rung: Any


#: How often the number of devices is doubled.
_DOUBLED = 10


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting, and what it takes."""

    config: MemSaveConfig  # to patch with
    needed: int  # bytes at the peak, with what CUDA takes for itself
    away: int  # bytes in main memory, pinned
    cost: float  # the operations that a step adds to stock's, as a part of stock's

    @property
    def family(self) -> Family:
        """The settings that differ from this one in their number of layers."""
        return Family(self.config.offload, self.config.checkpoint)

    @property
    def name(self) -> str:
        """What is done, in words."""
        return in_words(self.family, f" in {counted(int(self.config.first_blocks('checkpoint') or 0), 'layer')}")


def in_words(family: Family, layers: str = "") -> str:
    """What a family does, in words."""
    parts = [f"checkpoint={family.rung!r}{layers}"] if family.rung else []
    return ", ".join([*parts, *["offload"] * family.offload]) or "no product runs again"


@dataclass(frozen=True)
class Settings:
    """The settings of one model and step; what has to be traced is traced when it is asked for."""

    config: PreTrainedConfig
    depth: dict[str, int]
    training: Training
    shards: tuple[str, int]
    base: MemSaveConfig
    _traces: dict[Family, Trace] = field(default_factory=dict, init=False)

    @cached_property
    def stacks(self) -> list[str]:
        """The field of the configuration that counts it, for each layer."""
        return [field for field, layers in self.depth.items() for _ in range(layers)]

    def families(self) -> list[Family]:
        """All that may be used, those that offload last."""
        rungs = (None, "gate", "block", *["tiles"] * (self.training.seq_len > ROWS))
        return [Family(offload, rung) for offload in (False, True) for rung in rungs]

    def stock(self) -> dict[str, tuple[int, float]]:
        """Stock, and stock with gradient checkpointing -> bytes needed, and the cost."""
        found = {}
        for name, checkpointing in (("stock", False), ("stock, gradient checkpointing", True)):
            if checkpointing or not self.training.checkpointing:
                with contextlib.suppress(MeasureError):  # of a model that cannot be checkpointed
                    trace, stock = self._stock(checkpointing), self._stock()
                    found[name] = trace.peak + OWN, trace.flops / stock.flops - 1
        return found

    def _stock(self, checkpointing: bool = False) -> Trace:
        return self._traced(replace(self.training, checkpointing=checkpointing), None)

    def whole(self, family: Family) -> Setting:
        """The rung in all layers."""
        return self.setting(family, len(self.stacks) if family.rung else 0)

    def of(self, family: Family) -> Iterator[Setting]:
        """The rung in 1 layer, 2 layers, ..., all."""
        return (self.setting(family, layers) for layers in (range(1, len(self.stacks) + 1) if family.rung else [0]))

    def trace(self, family: Family) -> Trace:
        """The step with the family's rung in all layers, on one of the devices."""
        if family not in self._traces:
            self._traces[family] = self._traced(self.training, self._config(family))
        return self._traces[family]

    def setting(self, family: Family, layers: int) -> Setting:
        """The rung in the first ``layers``."""
        plain, whole, stock = self.trace(family._replace(rung=None)), self.trace(family), self._stock()
        away = int(self._mixed(plain, whole, layers, "away") // min(self.training.accumulation, 2))  # that were traced
        # Outside of layers the work is that of stock; of a loss in chunks, a trace runs some.
        flops = sum(plain.per_layer[stack]["flops"] - stock.per_layer[stack]["flops"] for stack in self.stacks)
        again = plain, whole
        if family.rung == "tiles":  # of whose rows a trace runs some: all products of a block run once more
            again = stock, self._stock(checkpointing=True)
        flops += self._mixed(*again, layers, "flops") - again[0].flops
        return Setting(
            config=self._config(family, layers),
            needed=self._peak(plain, whole, layers) + min(away, plain.in_flight) + OWN,  # what has not left yet
            away=away,
            cost=round(flops / stock.flops, 6),
        )

    def _traced(self, training: Training, memsave: MemSaveConfig | None) -> Trace:
        trace = trace_in_full(self.config, self.depth, training, memsave)
        if not trace.per_layer:
            raise MeasureError(
                f"a plan needs a text model whose layers are alike, got {trace.model}. Compare settings by hand, each "
                "with hf_memsave.estimate(...)."
            )
        return sharded(trace, *self.shards)

    def _config(self, family: Family, layers: int | None = None) -> MemSaveConfig:
        """The rung in the first ``layers``, or in all that a model has, which is traced with more of them."""
        changes = {"checkpoint": layers} if family.rung and layers is not None else {}
        layers_of = dict(self.base.layers or ()) | changes
        return replace(self.base, offload=family.offload, checkpoint=family.rung, layers=layers_of or None)

    def _mixed(self, plain: Trace, whole: Trace, layers: int, name: str) -> float:
        """A figure with the rung in the first ``layers``, of traces with it in none and in all."""
        # Each later layer adds as much as others of its stack; what is left is the first one's, which may be unlike.
        more = (whole.per_layer[stack][name] - plain.per_layer[stack][name] for stack in self.stacks[layers:])
        return float(getattr(whole, name) - sum(more) if layers else getattr(plain, name))

    def _peak(self, plain: Trace, whole: Trace, layers: int) -> int:
        """With the rung in the first ``layers``: there a block sees what it sees where all have it."""
        if layers in (0, len(self.stacks)):
            return (whole if layers else plain).peak
        blocks = [(stack, block) for stack, count in plain.blocks.items() for block in range(count)]
        less = int(plain.at_loss - self._mixed(plain, whole, layers, "at_loss"))
        highest = 0
        for place, moment in plain.places.items():
            if (place.stack, place.block) in blocks[:layers]:
                other = place._replace(is_after=not place.is_after)
                live = (whole.places.get(place) or whole.places.get(other) or moment).live
            else:
                live = moment.live - (0 if place.phase == "optimizer" else less)
            highest = max(highest, live)
        return highest


@dataclass(frozen=True, kw_only=True, repr=False)
class BudgetPlan:
    """What :func:`plan` found; prints as a table."""

    best: Setting  # the one of those that fit that adds the least work
    budget: int  # bytes that there are
    fitting: tuple[Setting, ...]  # the cheapest of each family that fits: without offload first, then by cost
    tried: tuple[Setting, ...]  # the floor, and each other setting that was traced, in all layers
    stock: dict[str, tuple[int, float]]  # stock, without and with gradient checkpointing -> bytes needed, and the cost

    @property
    def config(self) -> MemSaveConfig:
        """For :func:`hf_memsave.patch`."""
        return self.best.config

    def _rows(self) -> list[list[str]]:
        def row(name: str, needed: int, cost: float, away: int, fits: str) -> list[str]:
            much = f"{gib(needed - self.budget)} too much"
            return [name, gib(needed), f"{cost:.1%}", gib(away) if away else "", much if needed > self.budget else fits]

        rows = [row(name, *found, 0, "fits") for name, found in self.stock.items()]
        families = {setting.family for setting in self.fitting}
        for one in (*self.fitting, *(one for one in self.tried if one.family not in families)):
            fits = "the best" if one == self.best else "fits" if one.family in families else "too much main memory"
            rows.append(row(one.name, one.needed, one.cost, one.away, fits))
        return [["", "needed", "more work", "main memory", ""], *rows]

    def _remarks(self) -> list[str]:
        exact = "" if self.config.is_exact else " Its gradients are approximate."
        return [
            "More work: operations of products and attention, over those of stock's step. What is computed again "
            "element by element is not in it, nor the time that bytes take to main memory.",
            f"The cheapest in {both(self.budget)}: {self.best.name}.{exact}",
        ]

    def __repr__(self) -> str:
        best = self.best
        return f"<BudgetPlan for {gib(self.budget)}: {best.name}, {gib(best.needed)}, {best.cost:.1%} more work>"

    def __str__(self) -> str:
        rows = self._rows()
        wide = max(len(name) for name, *_ in rows) + 2
        lines = [f"{name:<{wide}}{n:>12}{cost:>11}{away:>13}  {fits}".rstrip() for name, n, cost, away, fits in rows]
        return "\n".join([*lines, *self._remarks()])

    def _repr_html_(self) -> str:
        return html_table(f"What fits in {gib(self.budget)}", self._rows(), self._remarks())


def plan(
    model_or_config: str | PreTrainedConfig | nn.Module, *, budget: int | str, batch_size: int, seq_len: int,
    memsave: MemSaveLike = True, main_memory: int | str | None = None, devices: int = 1, sharding: str = "ddp",
    **training: Any,
) -> BudgetPlan:  # fmt: skip
    """Find the setting whose training step fits and adds the fewest operations.

    Args:
        model_or_config: As for :func:`hf_memsave.estimate`.
        budget: What there is, in bytes or as "24GiB".
        batch_size: Sequences, on each device.
        seq_len: Tokens in each.
        memsave: What to begin with, as for :func:`hf_memsave.patch`; the plan chooses its checkpoint and offload.
        main_memory: What offload may take of it, on each device; None for any amount.
        devices: Over how many to shard.
        sharding: As for :func:`hf_memsave.estimate`.
        **training: As for :func:`hf_memsave.estimate`.

    Returns:
        The plan; ``patch(model, plan.config)`` does it.

    Raises:
        ConfigError: ``memsave`` names what does not exist.
        PlanError: Nothing fits; it says by how much, and what would. Or an argument has no such value.
        MeasureError: The model or a field is not known, or the step cannot be run.
    """
    limit = bytes_of(budget, "budget")
    most_away = None if main_memory is None else bytes_of(main_memory, "main_memory")
    training |= {"batch_size": batch_size, "seq_len": seq_len}
    return _plan(_settings(model_or_config, memsave, (sharding, devices), training), limit, most_away)


@without_gpus
def _plan(settings: Settings, limit: int, most_away: int | None) -> BudgetPlan:
    tried: list[Setting] = []
    fitting: dict[Family, Setting] = {}
    for family in settings.families():
        if family.offload and Family(False, None) in fitting:  # which costs nothing
            break
        tried.append(settings.whole(family))
        fit = (s for s in settings.of(family) if s.needed <= limit and s.away <= (most_away or s.away))
        if (first := next(fit, None)) is not None:
            fitting[family] = first
    if not fitting:
        raise PlanError(_too_much(settings, tried, limit))
    by_cost = sorted(fitting.values(), key=attrgetter("config.offload", "cost", "needed"))
    return BudgetPlan(best=by_cost[0], budget=limit, fitting=tuple(by_cost), tried=tuple(tried), stock=settings.stock())


def _settings(model: Any, memsave: Any, shards: tuple[str, int], fields: dict[str, Any]) -> Settings:
    config, training = config_of(model, fields), training_of(**fields)
    start = MemSaveConfig.resolve(memsave, may_plan=True)
    if start is None:
        raise PlanError(f"memsave: expected what to begin with, got {memsave!r}. Leave it out for the exact default.")
    config, depth = with_depth(config)
    layers = {kind: number for kind, number in dict(start.layers or ()).items() if kind != "checkpoint"}
    base = replace(start, budget=None, checkpoint=None, offload=False, layers=layers)
    return Settings(config, depth, training, shards, base)


def _with(settings: Settings, **changes: Any) -> Settings:
    """The settings of another step."""
    return replace(settings, training=replace(settings.training, **changes))


def _too_much(settings: Settings, tried: list[Setting], limit: int) -> str:
    least = min(tried, key=lambda setting: setting.needed)
    trace, would = settings.trace(least.family), []
    for name, words in (("batch_size", "sequences a batch"), ("seq_len", "tokens a sequence")):

        def needed(number: int, name: str = name) -> int:
            return _with(settings, **{name: number}).whole(least.family).needed

        if number := largest_of(
            needed, settings.config, name, getattr(settings.training, name), limit, trace.fixed + OWN
        ):
            would.append(f"{name}={number} ({words})")
    would += _what_fits(settings, least.family, limit)
    remedy = f"What fits: {'; '.join(would)}." if would else "Not one sequence of 8 tokens fits: use a smaller model."
    return (
        f"nothing fits: expected at most {gib(limit)}, got {gib(least.needed)} by {least.name} (parameters, gradients "
        f"and states alone {gib(trace.fixed)}), which is "
        f"{gib(least.needed - limit)} too much. {remedy}"
    )


def what_fits(
    model_or_config: str | PreTrainedConfig | nn.Module, *, budget: int | str, batch_size: int, seq_len: int,
    memsave: MemSaveLike = True, devices: int = 1, sharding: str = "ddp", **training: Any,
) -> list[str]:  # fmt: skip
    """Changes of a step, each of which makes it fit, in words and with what is needed then.

    Arguments and errors are those of :func:`plan`.

    Returns:
        Those that fit, each estimated: a rung in all layers, offload, another optimizer, adapters, FSDP.
    """
    start = MemSaveConfig.resolve(memsave) or MemSaveConfig()
    training |= {"batch_size": batch_size, "seq_len": seq_len}
    settings = _settings(model_or_config, start, (sharding, devices), training)
    return _what_fits(settings, Family(start.offload, start.checkpoint), bytes_of(budget, "budget"))


@without_gpus
def _what_fits(settings: Settings, family: Family, limit: int) -> list[str]:
    trace, training = settings.trace(family), settings.training
    step = trace.places.get(Place("optimizer"))
    ways: dict[str, tuple[Settings, Family]] = {}
    if step is None or step.live + OWN <= limit:  # else no rung changes that
        ways = {in_words(other): (settings, other) for other in settings.families()[1:]}
    if training.optimizer == "adamw":
        ways["fused AdamW"] = _with(settings, optimizer="adamw_fused"), family
    if training.optimizer in ("adamw", "adamw_fused"):
        ways["8-bit AdamW"] = _with(settings, optimizer="adamw_8bit"), family
    if training.lora is None:
        ways["LoRA (r=8)"] = _with(settings, lora=Lora(r=8)), family
    if not training.quantized:
        ways["LoRA on a model in 4 bits"] = _with(settings, lora=training.lora or Lora(r=8), quantized="nf4"), family
    found = []
    for words, (other, way) in ways.items():
        with contextlib.suppress(MeasureError):
            if (needed := other.whole(way).needed) <= limit:
                found.append(f"{words} ({gib(needed)})")
    for devices in (2 * settings.shards[1] * 2**i for i in range(_DOUBLED)):
        if (needed := replace(settings, shards=("fsdp", devices)).whole(family).needed) <= limit:
            return [*found, f"FSDP over {devices} devices ({gib(needed)})"]
    return found
