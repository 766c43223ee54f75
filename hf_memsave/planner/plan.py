"""The cheapest exact setting whose step fits a budget, found without a GPU.

What runs again in backward costs the same for every byte that it frees, up to the gate (a linear frees its output for
its product: one byte for so many operations as its input is wide). So there are two rungs to choose from: "gate", which
runs the fewest linears for what a layer frees, and "block", which also runs attention, where that is not enough; and
the number of layers. The peak of every such mixture follows from three traced steps: none, all, and all of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from hf_memsave.arch import RUN_AGAIN, is_run_again, path_of
from hf_memsave.config import MemSaveConfig
from hf_memsave.errors import PlanError
from hf_memsave.measure.estimate import CONTEXT, WORKSPACES, trace_in_full
from hf_memsave.measure.layers import depth_fields
from hf_memsave.measure.models import build_empty
from hf_memsave.measure.sharding import sharded
from hf_memsave.measure.trace import Place, Trace
from hf_memsave.measure.training import Training, config_of, training_of
from hf_memsave.patching.blocks import block_numbers, is_in_block
from hf_memsave.planner.trial import bytes_of, gib


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting, and what it takes.

    Attributes:
        config: To patch with.
        needed: Bytes at the peak, with what CUDA takes for itself.
        cost: Operations that run again, as a part of those of stock's step.
    """

    config: MemSaveConfig
    needed: int
    cost: float

    @property
    def name(self) -> str:
        """What is done, in words."""
        rung, layers = self.config.checkpoint, dict(self.config.layers or ()).get("checkpoint")
        return "the floor" if rung is None else f"checkpoint={rung!r} in {layers} layers"

    def __str__(self) -> str:
        return f"{self.name:<36}{gib(self.needed):>12}{self.cost:>10.1%} more operations"


@dataclass(frozen=True, kw_only=True)
class BudgetPlan:
    """What :func:`plan` found; prints as a table.

    Attributes:
        best: The cheapest that fits.
        budget: Bytes that there are.
        tried: The floor, and each rung in all layers, as far as they were needed.
    """

    best: Setting
    budget: int
    tried: tuple[Setting, ...]

    @property
    def config(self) -> MemSaveConfig:
        """For :func:`hf_memsave.patch`."""
        return self.best.config

    def __str__(self) -> str:
        lines = [str(setting) for setting in dict.fromkeys((*self.tried, self.best))]
        return "\n".join([*lines, f"The cheapest in {gib(self.budget)}: {self.best.name}."])


def plan(
    model_or_config: str | PreTrainedConfig | nn.Module,
    *,
    budget: int | str,
    batch_size: int,
    seq_len: int,
    devices: int = 1,
    sharding: str = "ddp",
    progress: Callable[[float], None] | None = None,
    **training: Any,
) -> BudgetPlan:
    """Find the cheapest exact setting whose training step fits.

    Args:
        model_or_config: As for :func:`hf_memsave.estimate`.
        budget: What there is, in bytes or as "24GiB".
        batch_size: Sequences, on each device.
        seq_len: Tokens in each.
        devices: Over how many to shard.
        sharding: As for :func:`hf_memsave.estimate`.
        progress: Told the share that is done.
        **training: As for :func:`hf_memsave.estimate`.

    Returns:
        The plan; ``patch(model, plan.config)`` does it.

    Raises:
        PlanError: Nothing fits; it says by how much, and what would.
        MeasureError: The model or a field is not known, or the step cannot be run.
    """
    limit = bytes_of(budget)
    config = config_of(model_or_config, training)
    search = _Search(config, training_of(batch_size=batch_size, seq_len=seq_len, **training), (sharding, devices))
    tried: list[Setting] = []
    for done, rung in enumerate((None, "gate", "block")):
        (progress or _nobody)(done / 3)
        tried.append(search.whole(rung))
        if tried[-1].needed <= limit:
            break
    else:
        raise PlanError(_too_much(tried, limit))
    (progress or _nobody)(1)
    mixtures = [s for rung in search.traces if rung for s in search.mixtures(rung)]
    best = min((s for s in (tried[0], *mixtures) if s.needed <= limit), key=lambda s: (s.cost, s.needed))
    return BudgetPlan(best=best, budget=limit, tried=tuple(tried))


def _nobody(share: float) -> None:
    return None


def _too_much(tried: list[Setting], limit: int) -> str:
    least = min(tried, key=lambda setting: setting.needed)
    return (
        f"nothing fits: expected at most {gib(limit)}, got {gib(least.needed)} by {least.name}, which is "
        f"{gib(least.needed - limit)} too much. Use a smaller batch or shorter sequences, adapters (lora=) on a "
        "frozen or quantized base, an optimizer with smaller states, or shard over more devices."
    )


class _Search:
    """Traces as they are needed, of one model and step."""

    def __init__(self, config: PreTrainedConfig, training: Training, shards: tuple[str, int]) -> None:
        self.config, self.training, self.shards = config, training, shards
        self.depth = {field: getattr(config, field) for field in depth_fields(config)}
        self.traces: dict[str | None, Trace] = {}
        self.kept: dict[str | None, list[float]] = {}
        self.costs = _costs(config, training)

    @property
    def layers(self) -> int:
        return sum(self.depth.values())

    def whole(self, rung: Any) -> Setting:
        """The rung in all layers."""
        traced, per_layer = trace_in_full(self.config, self.depth, self.training, MemSaveConfig(checkpoint=rung))
        self.traces[rung] = sharded(traced.trace, *self.shards)
        self.kept[rung] = list(per_layer.values())
        return self._setting(rung, self.layers, self.traces[rung].peak)

    def mixtures(self, rung: str) -> Iterator[Setting]:
        """The rung in 1 layer, 2 layers, ..., all."""
        for layers in range(1, self.layers + 1):
            yield self._setting(rung, layers, self._peak(rung, layers))

    def _setting(self, rung: Any, layers: int, peak: int) -> Setting:
        config = MemSaveConfig(checkpoint=rung, layers={"checkpoint": layers} if rung else None)
        cost = self.costs[rung] * layers if rung else 0.0
        return Setting(config=config, needed=peak + WORKSPACES + CONTEXT, cost=cost)

    def _peak(self, rung: str, layers: int) -> int:
        """With the rung in the first ``layers``: there a block sees what it sees where all have it."""
        plain, all_of_it = self.traces[None], self.traces[rung]
        numbers = _numbers(plain)
        freed = [a - b for a, b in zip(self.kept[None], self.kept[rung], strict=True)]
        by_block = [f for f, n in zip(freed, self.depth.values(), strict=True) for _ in range(n)]
        highest = 0
        for place, moment in plain.places.items():
            number = numbers.get((place.stack, place.block))
            if place.stack and number is not None and number < layers:
                there = all_of_it.places.get(_untimed(place, all_of_it), moment)
                highest = max(highest, there.live)
            elif place.phase == "optimizer":
                highest = max(highest, moment.live)
            else:
                highest = max(highest, moment.live - int(sum(by_block[:layers])))
        return highest


def _numbers(trace: Trace) -> dict[tuple[str, int], int]:
    found = [(stack, block) for stack, count in trace.blocks.items() for block in range(count)]
    return {place: number for number, place in enumerate(found)}


def _untimed(place: Place, trace: Trace) -> Place:
    return place if place in trace.places else place._replace(is_after=not place.is_after)


def _costs(config: PreTrainedConfig, training: Training) -> dict[str, float]:
    """What a layer that runs again adds, as a part of stock's step (which is three times its forward, at most)."""
    model = build_empty(config)
    numbers = block_numbers(model)
    tokens = training.batch_size * training.seq_len
    again, of_all = 0, 0
    for name, module in model.named_modules():
        if path_of(type(module)) not in RUN_AGAIN:
            continue
        numel = module.weight.numel()
        of_all += numel
        if is_in_block(name, numbers):
            again += numel * is_run_again(name, "gate")
    layers = max(1, len(numbers))
    attention = 4 * tokens * training.seq_len * getattr(config, "hidden_size", 0)
    step = (2 if training.lora else 3) * (2 * tokens * of_all + layers * attention)
    gate = 2 * tokens * again / layers
    return {"gate": gate / step, "block": (gate + attention) / step}
