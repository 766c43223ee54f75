"""The cheapest setting whose step fits a budget, found without a GPU; or what would fit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from hf_memsave.config.config import MemSaveConfig, MemSaveLike
from hf_memsave.config.lora import Lora
from hf_memsave.config.sizes import both, bytes_of, gib, html_table
from hf_memsave.errors import MeasureError, PlanError
from hf_memsave.measure.estimate import OWN, sharded
from hf_memsave.measure.largest import largest_of
from hf_memsave.measure.trace import Place, Trace
from hf_memsave.measure.training import config_of, training_of
from hf_memsave.planner.rates import Rates, rates_of
from hf_memsave.planner.settings import FLOOR, OFFLOAD, Family, Setting, Settings, in_words, trace_of

#: The settings that are offered where a step does not fit.
_BELOW = (Family(False, "gate"), OFFLOAD, *(Family(far, rung) for rung in ("block", "tiles") for far in (False, True)))
#: How often the number of devices is doubled.
_DOUBLED = 10
_BY_COST = attrgetter("cost", "needed")


@dataclass(frozen=True, kw_only=True, repr=False)
class BudgetPlan:
    """What :func:`plan` found; prints as a table."""

    best: Setting  # the cheapest that fits
    budget: int  # bytes that there are
    fitting: tuple[Setting, ...]  # the cheapest of each family that was asked about and fits, by cost
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
        return [["", "needed", "more time", "main memory", ""], *rows]

    def _remarks(self) -> list[str]:
        exact = "" if self.config.is_exact else " Its gradients are approximate."
        return [
            "More time: of stock's step, by the work that is counted: products and attention that run again, and bytes "
            "that are moved. What every setting computes again, element by element, is not in it.",
            f"The cheapest in {both(self.budget)}: {self.best.name}.{exact}",
        ]

    def __repr__(self) -> str:
        best = self.best
        return f"<BudgetPlan for {gib(self.budget)}: {best.name}, {gib(best.needed)}, {best.cost:.1%} more time>"

    def __str__(self) -> str:
        rows = self._rows()
        wide = max(len(name) for name, *_ in rows) + 2
        lines = [f"{name:<{wide}}{n:>12}{cost:>11}{away:>13}  {fits}".rstrip() for name, n, cost, away, fits in rows]
        return "\n".join([*lines, *self._remarks()])

    def _repr_html_(self) -> str:
        return html_table(f"What fits in {gib(self.budget)}", self._rows(), self._remarks())


def plan(
    model_or_config: str | PreTrainedConfig | nn.Module, *, budget: int | str, batch_size: int, seq_len: int,
    memsave: MemSaveLike = True, rates: Rates | str = "a100",
    main_memory: int | str | None = None, devices: int = 1, sharding: str = "ddp", **training: Any,
) -> BudgetPlan:  # fmt: skip
    """Find the cheapest setting whose training step fits.

    Args:
        model_or_config: As for :func:`hf_memsave.estimate`.
        budget: What there is, in bytes or as "24GiB".
        batch_size: Sequences, on each device.
        seq_len: Tokens in each.
        memsave: What to begin with, as for :func:`hf_memsave.patch`; the plan chooses its checkpoint and offload.
        rates: What the device does in a second, or its name: "a100", "h100", "rtx4090".
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
    settings = _settings(model_or_config, memsave, rates, (sharding, devices), training)
    tried: list[Setting] = []
    fitting: dict[Family, Setting] = {}
    for family in settings.families():
        if family.offload and FLOOR in fitting:  # which costs nothing
            break
        tried.append(settings.whole(family))
        fit = [s for s in settings.of(family) if s.needed <= limit and s.away <= (most_away or s.away)]
        if fit:
            fitting[family] = min(fit, key=_BY_COST)
    if not fitting:
        raise PlanError(_too_much(settings, tried, limit))
    by_cost = sorted(fitting.values(), key=_BY_COST)
    return BudgetPlan(best=by_cost[0], budget=limit, fitting=tuple(by_cost), tried=tuple(tried), stock=settings.stock())


def _settings(
    model: Any, memsave: Any, rates: Rates | str, shards: tuple[str, int], fields: dict[str, Any]
) -> Settings:
    config, training = config_of(model, fields), training_of(**fields)
    start = MemSaveConfig.resolve(memsave, may_plan=True)
    if start is None:
        raise PlanError(f"memsave: expected what to begin with, got {memsave!r}. Leave it out for the exact default.")
    layers = {kind: number for kind, number in dict(start.layers or ()).items() if kind != "checkpoint"}
    base = replace(start, budget=None, checkpoint=None, offload=False, layers=layers)
    return Settings(config, training, shards, base, rates_of(rates))


def _with(settings: Settings, **changes: Any) -> Settings:
    """The settings of another step."""
    return replace(settings, training=replace(settings.training, **changes))


def _most(settings: Settings, family: Family, limit: int, name: str) -> int:
    """The largest "batch_size" or "seq_len" of the family's setting in all layers; 0 if not even 1 fits."""

    def run(number: int) -> tuple[Trace, int]:
        other = _with(settings, **{name: number})
        trace = other.trace(family)
        return trace, other.whole(family).needed - trace.peak

    return largest_of(run, settings.config, name, getattr(settings.training, name), limit)


def _too_much(settings: Settings, tried: list[Setting], limit: int) -> str:
    least = min(tried, key=lambda setting: setting.needed)
    trace, would = settings.trace(least.family), []
    for name, words in (("batch_size", "sequences a batch"), ("seq_len", "tokens a sequence")):
        if number := _most(settings, least.family, limit, name):
            would.append(f"{name}={number} ({words})")
    would += _what_fits(settings, least.family, limit)
    remedy = f"What fits: {'; '.join(would)}." if would else "Not one sequence of 8 tokens fits: use a smaller model."
    return (
        f"nothing fits: expected at most {gib(limit)}, got {gib(least.needed)} by {least.name} (parameters, gradients "
        f"and states alone {gib(trace.parameters + trace.trained + trace.states)}), which is "
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
    settings = _settings(model_or_config, start, "a100", (sharding, devices), training)
    return list(_what_fits(settings, Family(start.offload, start.checkpoint), bytes_of(budget, "budget")))


def _what_fits(settings: Settings, family: Family, limit: int) -> Iterator[str]:
    trace, training = settings.trace(family), settings.training
    step = trace.places.get(Place("optimizer"))
    ways: dict[str, tuple[Settings, Family]] = {}
    if step is None or step.live + OWN <= limit:  # else no rung changes that
        ways = {in_words(other): (settings, other) for other in _BELOW if other in settings.families()}
    if training.optimizer == "adamw":
        ways["fused AdamW"] = _with(settings, optimizer="adamw_fused"), family
    if training.optimizer in ("adamw", "adamw_fused"):
        ways["8-bit AdamW"] = _with(settings, optimizer="adamw_8bit"), family
    if training.lora is None:
        ways["LoRA (r=8)"] = _with(settings, lora=Lora(r=8)), family
    if not training.quantized:
        ways["LoRA on a model in 4 bits"] = _with(settings, lora=training.lora or Lora(r=8), quantized="nf4"), family
    for words, (other, way) in ways.items():
        with contextlib.suppress(MeasureError):
            if (needed := other.whole(way).needed) <= limit:
                yield f"{words} ({gib(needed)})"
    beside = settings.whole(family).needed - trace.peak
    one = trace_of(settings.config, training, settings.whole(family).config).trace
    for devices in (2 * settings.shards[1] * 2**i for i in range(_DOUBLED)):
        if (needed := sharded(one, "fsdp", devices).peak + beside) <= limit:
            yield f"FSDP over {devices} devices ({gib(needed)})"
            return
