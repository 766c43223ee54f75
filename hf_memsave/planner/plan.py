"""Find the cheapest setting whose training step fits a budget, without a GPU; or say what would fit.

Settings are a list: a rung of ``checkpoint`` in the first 1, 2, ... layers, or none. The figures of each follow from
two traced steps, with the rung in no layer and in all: bytes at the peak, and operations added to stock's. Of those
that fit, the one that adds the fewest wins. Offload adds none, but no trace tells how fast its bytes move: settings
with it come after those that fit without.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from hf_memsave.config.config import MemSaveConfig, MemSaveLike
from hf_memsave.config.lora import Lora
from hf_memsave.config.sizes import both, bytes_of, counted, gib, html_table
from hf_memsave.errors import ConfigError, MeasureError, PatchError, PlanError
from hf_memsave.measure.depth import trace_in_full, with_depth
from hf_memsave.measure.fake_device import without_gpus
from hf_memsave.measure.figures import OWN, Trace
from hf_memsave.measure.largest import largest_of
from hf_memsave.measure.training import Training, config_of, training_of
from hf_memsave.patching.rows import ROWS


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Stock, or one setting of checkpoint and offload, and what its training step takes."""

    config: MemSaveConfig | None  # to patch with; None for stock
    needed: int  # bytes at the peak, with CUDA's own
    away: int  # bytes in main memory, pinned
    cost: float  # operations that a step adds to stock's, as a fraction of stock's

    @property
    def name(self) -> str:
        """The checkpoint with its layers, and offload, in words."""
        if self.config is None:
            return "stock"
        return in_words(self.config, f" in {counted(int(self.config.first_blocks('checkpoint') or 0), 'layer')}")


def in_words(config: MemSaveConfig, layers: str = "") -> str:
    """Describe a config's checkpoint, with these words on its layers, and its offload."""
    parts = [f"checkpoint={config.checkpoint!r}{layers}"] if config.checkpoint else []
    return ", ".join([*parts, *["offload"] * config.offload]) or "no product runs again"


@dataclass(frozen=True)
class Settings:
    """The settings of one model and step. A *way* has its rung in all layers; other settings in the first ones."""

    config: PreTrainedConfig
    depth: dict[str, int]
    training: Training
    shards: tuple[str, int]
    start: MemSaveConfig  # the config to begin with

    @cached_property
    def stacks(self) -> list[str]:
        """For each layer, the configuration's field with the number of layers of its stack."""
        return [field for field, layers in self.depth.items() for _ in range(layers)]

    def ways(self) -> list[MemSaveConfig]:
        """Return all ways that may be used, those that offload last."""
        rungs, found = (None, "gate", "block", *["tiles"] * (self.training.seq_len > ROWS)), []
        for offload, rung in itertools.product((False, True), rungs):
            with contextlib.suppress(ConfigError):  # of what cannot be beside what was asked for
                found.append(self.way(rung, offload))
        return found

    def way(self, rung: Any = None, offload: bool = False) -> MemSaveConfig:
        """Return :attr:`start` with this rung in all layers, with or without offload."""
        layers = {kind: number for kind, number in dict(self.start.layers or ()).items() if kind != "checkpoint"}
        tiles = self.start.tiles if rung == "tiles" else None
        return replace(self.start, budget=None, checkpoint=rung, tiles=tiles, offload=offload, layers=layers)

    def stock(self) -> dict[str, tuple[int, float]]:
        """Return the bytes needed and the cost of stock without and with gradient checkpointing, by name."""
        found = {}
        for name, checkpointing in (("stock", False), ("stock, gradient checkpointing", True)):
            if checkpointing or not self.training.checkpointing:
                with contextlib.suppress(MeasureError):  # of a model that cannot be checkpointed
                    trace, stock = self.trace(None, checkpointing=checkpointing), self.trace(None, checkpointing=False)
                    found[name] = trace.needed, trace.flops / stock.flops - 1
        return found

    def trace(self, way: MemSaveConfig | None, **changes: Any) -> Trace:
        """Trace a way's step, or stock's for None, on one of the devices, with these fields of the training changed."""
        trace = trace_in_full(self.config, self.depth, replace(self.training, **changes), way)
        if not trace.per_layer:
            reason = f"a plan needs a text model whose layers are alike, got {trace.model}."
            raise MeasureError(reason, "Compare settings by hand, each with hf_memsave.estimate(...).")
        return trace.sharded(*self.shards)

    def setting(self, way: MemSaveConfig, layers: int | None = None, **changes: Any) -> Setting:
        """Return the setting with a way's rung in the first ``layers``, or in all, in a step with these changes."""
        layers = len(self.stacks) if layers is None else layers
        plain, whole = self.trace(self.way(offload=way.offload), **changes), self.trace(way, **changes)
        stock = self.trace(None, **changes | {"checkpointing": False})
        away = int(self._mixed(plain, whole, layers, "away"))
        # Outside of layers the work is that of stock; of a loss in chunks, a trace runs some.
        flops = sum(plain.per_layer[stack]["flops"] - stock.per_layer[stack]["flops"] for stack in self.stacks)
        again = plain, whole
        if way.checkpoint == "tiles":  # of whose rows a trace runs some: all products of a block run once more
            again = stock, self.trace(None, **changes | {"checkpointing": True})
        flops += self._mixed(*again, layers, "flops") - again[0].flops
        limited = {**dict(way.layers or ()), "checkpoint": layers}
        config, cost = replace(way, layers=limited) if way.checkpoint else way, round(flops / stock.flops, 6)
        needed = self._peak(plain, whole, layers) + min(away, plain.in_flight) + OWN  # what has not left yet
        return Setting(config=config, needed=needed, away=away, cost=cost)

    def _mixed(self, plain: Trace, whole: Trace, layers: int, name: str) -> float:
        """Interpolate a figure with the rung in the first ``layers``, from traces with it in none and in all."""
        # Each later layer adds as much as others of its stack; what is left is the first one's, which may be unlike.
        more = (whole.per_layer[stack][name] - plain.per_layer[stack][name] for stack in self.stacks[layers:])
        return float(getattr(whole, name) - sum(more))

    def _peak(self, plain: Trace, whole: Trace, layers: int) -> int:
        """Return the peak with the rung in the first ``layers``, whose blocks are as where all layers have it."""
        if layers == len(self.stacks):
            return whole.peak
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
    """The result of :func:`plan`; ``str()`` of it is a table."""

    best: Setting  # stock if it fits; else the fitting setting that adds the least work
    budget: int  # bytes available
    fitting: tuple[Setting, ...] = ()  # the cheapest of each way that fits: without offload first, then by cost
    tried: tuple[Setting, ...] = ()  # the floor, and each other setting, in all layers; none where stock fits
    stock: dict[str, tuple[int, float]]  # stock, without and with gradient checkpointing -> bytes needed, and the cost

    @property
    def config(self) -> MemSaveConfig | None:
        """The config for :func:`hf_memsave.patch` or a trainer's ``memsave=``; None where stock fits."""
        return self.best.config

    def _rows(self) -> list[list[str]]:
        def row(name: str, needed: int, cost: float, away: int, fits: str) -> list[str]:
            much = f"{gib(needed - self.budget)} too much"
            return [name, gib(needed), f"{cost:.1%}", gib(away) if away else "", much if needed > self.budget else fits]

        rows = [row(name, *found, 0, "fits") for name, found in self.stock.items()]
        if self.config is None:
            rows[0][-1] = "the best"
        way_of = attrgetter("config.offload", "config.checkpoint")
        others = [one for one in self.tried if way_of(one) not in map(way_of, self.fitting)]
        for one in (*self.fitting, *others):
            fits = "too much main memory" if one in others else "the best" if one == self.best else "fits"
            rows.append(row(one.name, one.needed, one.cost, one.away, fits))
        return [["", "needed", "more work", "main memory", ""], *rows]

    def _remarks(self) -> list[str]:
        if self.config is None:
            return [f"Stock fits in {both(self.budget)}: you need nothing."]
        exact = "" if self.config.is_exact else " Its gradients are approximate."
        return [
            f"The cheapest in {both(self.budget)}: {self.best.name}.{exact}",
            "More work: products and attention, not elementwise functions or copies. Stock makes all logits at once.",
            'checkpoint="gate": attention and outputs of experts are kept, everything else of a block runs again.',
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
    """Find the setting whose training step fits and adds the fewest operations: stock, if it fits.

    Args:
        model_or_config: As for :func:`hf_memsave.estimate`.
        budget: The memory of each device, in bytes or as "24GiB".
        batch_size: Sequences on each device.
        seq_len: Tokens in each sequence.
        memsave: The config to begin with, as for :func:`hf_memsave.patch`; the plan chooses its checkpoint and offload.
        main_memory: Main memory that offload may take for each device; None for any amount.
        devices: Number of devices that train together.
        sharding: As for :func:`hf_memsave.estimate`.
        **training: As for :func:`hf_memsave.estimate`.

    Returns:
        The plan; ``patch(model, plan.config)`` applies it, unless its ``config`` is None, as stock fits.

    Raises:
        ConfigError: ``memsave`` names a preset, file, field or value that does not exist.
        PlanError: Nothing fits (the message says by how much, and what would), or an argument has no such value.
        MeasureError: The model or a field is not known, or the step cannot be run.

    Example:
        >>> from hf_memsave import plan
        >>> from transformers import LlamaConfig
        >>> small = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 8}
        >>> found = plan(LlamaConfig(**small, vocab_size=256), budget="620MiB", batch_size=8, seq_len=512)
        >>> found.config.checkpoint, found.best.needed <= found.budget
        ('gate', True)
    """
    limit = bytes_of(budget, "budget")
    most_away = None if main_memory is None else bytes_of(main_memory, "main_memory")
    start = MemSaveConfig.resolve(memsave, may_plan=True)
    if start is None:
        raise PlanError(f"memsave: expected what to begin with, got {memsave!r}. Leave it out for the exact default.")
    config, depth = with_depth(config_of(model_or_config, training))
    step = training_of(batch_size=batch_size, seq_len=seq_len, **training)
    return _plan(Settings(config, depth, step, (sharding, devices), start), limit, most_away)


@without_gpus
def _plan(settings: Settings, limit: int, most_away: int | None) -> BudgetPlan:
    stock = settings.stock()
    needed, cost = next(iter(stock.values()), (limit + 1, 0.0))  # of the step as it is
    if needed <= limit:
        return BudgetPlan(best=Setting(config=None, needed=needed, away=0, cost=cost), budget=limit, stock=stock)
    tried: dict[MemSaveConfig, Setting] = {}
    fitting: dict[MemSaveConfig, Setting] = {}
    for way in settings.ways():
        if way.offload and settings.way() in fitting:  # which costs nothing
            break
        try:
            tried[way] = settings.setting(way)
        except PatchError:  # such as of "gate", beside linears that are sampled
            if not tried:
                raise
            continue
        fewer = (settings.setting(way, layers) for layers in range(1, len(settings.stacks)) if way.checkpoint)
        for one in itertools.chain(fewer, [tried[way]]):
            if one.needed <= limit and one.away <= (most_away or one.away):
                fitting[way] = one
                break
    if not fitting:
        raise PlanError(_too_much(settings, tried, limit))
    by_cost = sorted(fitting.values(), key=attrgetter("config.offload", "cost", "needed"))
    return BudgetPlan(best=by_cost[0], budget=limit, fitting=tuple(by_cost), tried=tuple(tried.values()), stock=stock)


def _too_much(settings: Settings, tried: dict[MemSaveConfig, Setting], limit: int) -> str:
    way, least = min(tried.items(), key=lambda item: item[1].needed)
    trace, would = settings.trace(way), []
    for name, words in (("batch_size", "sequences a batch"), ("seq_len", "tokens a sequence")):

        def needed(number: int, name: str = name) -> int:
            return settings.setting(way, **{name: number}).needed

        start, fixed = getattr(settings.training, name), trace.fixed + OWN
        if number := largest_of(needed, settings.config, name, start, limit, fixed):
            would.append(f"{name}={number} ({words})")
    would += what_fits(settings, way, limit)
    none = "Not one sequence of 8 tokens fits: use a smaller model, or more memory."
    remedy = f"What fits: {'; '.join(would)}." if would else none
    alone = f"parameters, gradients and states alone {gib(trace.fixed)}, CUDA's own {gib(OWN)}"
    found = f"{gib(least.needed)} with {least.name} ({alone}): {gib(least.needed - limit)} too much"
    return f"nothing fits: expected at most {gib(limit)}, got {found}. {remedy}"


@without_gpus
def what_fits(settings: Settings, way: MemSaveConfig, limit: int) -> list[str]:
    """Return the changes that each make a way's step fit, in words, with the bytes then needed."""
    training, changes = settings.training, dict[str, tuple[MemSaveConfig, dict[str, Any]]]()
    if settings.trace(way).in_optimizer + OWN <= limit:  # else no rung changes that
        changes = {in_words(other): (other, {}) for other in settings.ways()[1:]}
    if training.optimizer == "adamw":
        changes["fused AdamW"] = way, {"optimizer": "adamw_fused"}
    if training.optimizer in ("adamw", "adamw_fused"):
        changes["8-bit AdamW"] = way, {"optimizer": "adamw_8bit"}
    if training.lora is None:
        changes["LoRA (r=8)"] = way, {"lora": Lora(r=8)}
    if not training.quantized:
        changes["LoRA on a model in 4 bits"] = way, {"lora": training.lora or Lora(r=8), "quantized": "nf4"}
    found = []
    for words, (other, fields) in changes.items():
        with contextlib.suppress(MeasureError, PatchError):
            if (needed := settings.setting(other, **fields).needed) <= limit:
                found.append(f"{words} ({gib(needed)})")
    for devices in (settings.shards[1] * 2**doubled for doubled in range(1, 11)):
        if (needed := replace(settings, shards=("fsdp", devices)).setting(way).needed) <= limit:
            return [*found, f"FSDP over {devices} devices ({gib(needed)})"]
    return found
