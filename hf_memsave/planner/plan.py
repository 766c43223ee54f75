"""The cheapest setting whose step fits a budget, found without a GPU; and the largest step that fits one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from hf_memsave.config.config import MemSaveConfig, MemSaveLike
from hf_memsave.config.lora import Lora
from hf_memsave.config.sizes import bytes_of, gib
from hf_memsave.errors import MeasureError, PlanError
from hf_memsave.measure.estimate import most_of, search, sharded
from hf_memsave.measure.training import config_of, training_of
from hf_memsave.planner.rates import Rates, rates_of
from hf_memsave.planner.settings import FLOOR, OFFLOAD, Family, Setting, Settings, in_words, trace_of

#: Codecs that may be allowed, whose gradients are approximate.
LOSSY = ("int8", "int4")
#: The settings of which the largest batch and the longest sequence are told.
_ENDS = (FLOOR, FLOOR._replace(rung="gate"), OFFLOAD, FLOOR._replace(rung="block"), OFFLOAD._replace(rung="block"))
#: More is not asked for.
_MOST_DEVICES = 1024


@dataclass(frozen=True, kw_only=True)
class BudgetPlan:
    """What :func:`plan` found; prints as a table."""

    best: Setting  # the cheapest that fits
    budget: int  # bytes that there are
    tried: tuple[Setting, ...]  # the floor, and each other setting that was traced, in all layers

    @property
    def config(self) -> MemSaveConfig:
        """For :func:`hf_memsave.patch`."""
        return self.best.config

    def __str__(self) -> str:
        lines = [str(setting) for setting in dict.fromkeys((*self.tried, self.best))]
        exact = "" if self.config.is_exact else " Its gradients are approximate."
        return "\n".join([*lines, f"The cheapest in {gib(self.budget)}: {self.best.name}.{exact}"])


def plan(
    model_or_config: str | PreTrainedConfig | nn.Module, *, budget: int | str, batch_size: int, seq_len: int,
    memsave: MemSaveLike = True, lossy: Collection[str] = (), rates: Rates | str = "a100",
    main_memory: int | str | None = None, devices: int = 1, sharding: str = "ddp",
    progress: Callable[[float], None] | None = None, **training: Any,
) -> BudgetPlan:  # fmt: skip
    """Find the cheapest setting whose training step fits.

    Args:
        model_or_config: As for :func:`hf_memsave.estimate`.
        budget: What there is, in bytes or as "24GiB".
        batch_size: Sequences, on each device.
        seq_len: Tokens in each.
        memsave: What to begin with, as for :func:`hf_memsave.patch`; the plan chooses its checkpoint and offload.
        lossy: Of "int8" and "int4", the codecs that may be used too. Without any, the plan is as exact as ``memsave``.
        rates: What the device does in a second, or its name: "a100", "h100", "rtx4090".
        main_memory: What offload may take of it, on each device; None for any amount.
        devices: Over how many to shard.
        sharding: As for :func:`hf_memsave.estimate`.
        progress: Told the share that is done.
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
    settings = _settings(model_or_config, memsave, rates, (sharding, devices), batch_size, seq_len, training)
    tried: list[Setting] = []
    best: Setting | None = None
    families = settings.families(_codecs(lossy))
    tell = progress or (lambda share: None)
    for done in range(len(families)):
        tell(done / len(families))
        bounds = [settings.least_cost(family, limit) for family in families]
        if best is not None and min(bounds) >= best.cost:
            break
        family = families.pop(bounds.index(min(bounds)))
        tried.append(settings.whole(family))
        fitting = [s for s in settings.of(family) if s.needed <= limit and s.away <= (most_away or s.away)]
        best = min((s for s in (best, *fitting) if s is not None), key=lambda s: (s.cost, s.needed), default=None)
    tell(1)
    if best is None:
        raise PlanError(_too_much(settings, tried, limit))
    return BudgetPlan(best=best, budget=limit, tried=tuple(tried))


def largest(
    model_or_config: str | PreTrainedConfig | nn.Module, *, budget: int | str, batch_size: int, seq_len: int,
    memsave: MemSaveLike = True, rates: Rates | str = "a100", devices: int = 1, sharding: str = "ddp",
    progress: Callable[[float], None] | None = None, **training: Any,
) -> dict[str, tuple[int, int]]:  # fmt: skip
    """The largest batch (of ``seq_len``) and the longest sequence (in batches of ``batch_size``) that fit.

    Arguments and errors are those of :func:`plan`.

    Returns:
        Setting in words -> sequences, tokens: at the floor, with each rung in all layers, and with offload.
    """
    limit = bytes_of(budget, "budget")
    settings = _settings(model_or_config, memsave, rates, (sharding, devices), batch_size, seq_len, training)
    found = {}
    for done, family in enumerate(_ENDS):
        if progress is not None:
            progress(done / len(_ENDS))
        sequences, tokens = (_most(settings, family, limit, name) for name in ("batch_size", "seq_len"))
        found[in_words(family)] = sequences, tokens
    return found


def _settings(
    model: Any, memsave: Any, rates: Rates | str, shards: tuple[str, int], batch_size: int, seq_len: int,
    fields: dict[str, Any],
) -> Settings:  # fmt: skip
    config = config_of(model, fields)
    training = training_of(batch_size=batch_size, seq_len=seq_len, **fields)
    start = MemSaveConfig.resolve(memsave, may_plan=True)
    if start is None:
        raise PlanError(f"memsave: expected what to begin with, got {memsave!r}. Leave it out for the exact default.")
    layers = {kind: number for kind, number in dict(start.layers or ()).items() if kind != "checkpoint"}
    base = replace(start, budget=None, checkpoint=None, offload=False, layers=layers)
    return Settings(config, training, shards, base, rates_of(rates))


def _codecs(lossy: Collection[str]) -> tuple[str, ...]:
    names = (lossy,) if isinstance(lossy, str) else tuple(lossy)
    if unknown := [name for name in names if name not in LOSSY]:
        raise PlanError(
            f"lossy: expected some of {', '.join(LOSSY)}, got {unknown[0]!r}. Leave it out for exact plans."
        )
    return names


def _with(settings: Settings, family: Family, **changes: Any) -> int:
    """Bytes that the family's setting in all layers needs in another step."""
    return replace(settings, training=replace(settings.training, **changes)).whole(family).needed


def _most(settings: Settings, family: Family, limit: int, name: str) -> int:
    """The largest "batch_size" or "seq_len" of the family's setting in all layers; 0 if not even 1 fits."""
    start, most = getattr(settings.training, name), most_of(settings.config, name)
    return search(lambda number: _with(settings, family, **{name: number}), limit, start, most)


def _too_much(settings: Settings, tried: list[Setting], limit: int) -> str:
    least = min(tried, key=lambda setting: setting.needed)
    would = list(_what_fits(settings, least, limit))
    remedy = f"What fits: {'; '.join(would)}." if would else "Not one sequence of one token fits: use a smaller model."
    return (
        f"nothing fits: expected at most {gib(limit)}, got {gib(least.needed)} by {least.name}, which is "
        f"{gib(least.needed - limit)} too much. {remedy}"
    )


def _what_fits(settings: Settings, least: Setting, limit: int) -> Iterator[str]:
    """Smaller steps of a setting in all layers, FSDP over more devices, or adapters."""
    for name, words in (("batch_size", "sequences a batch"), ("seq_len", "tokens a sequence")):
        if number := _most(settings, least.family, limit, name):
            yield f"{number:,} {words}"
    one = trace_of(settings.config, settings.training, least.config).trace
    extra = least.needed - settings.trace(least.family).peak
    devices = 2 * settings.shards[1]
    while devices <= _MOST_DEVICES and sharded(one, "fsdp", devices).peak + extra > limit:
        devices *= 2
    if devices <= _MOST_DEVICES:
        yield f"FSDP over {devices} devices"
    if settings.training.lora is None:
        with contextlib.suppress(MeasureError):
            if _with(settings, least.family, lora=Lora(r=8)) <= limit:
                yield "LoRA with r=8"
