"""Settings below the floor, what each takes, and what it costs.

What runs again in backward costs the same for every byte that it frees, up to the gate (a linear frees its output for
its product: one byte for so many operations as its input is wide). So there are few rungs to choose from: "gate", which
runs the fewest linears for what a layer frees, "block", which also runs attention, and for sequences of more than one
tile "tiles"; in some number of the first layers; each with or without offload. The peak of every such mixture follows
from two traced settings: the rung in no layer, and in all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from hf_memsave.config.config import MemSaveConfig
from hf_memsave.config.sizes import counted
from hf_memsave.errors import MeasureError
from hf_memsave.measure.depth import InFull, trace_in_full
from hf_memsave.measure.estimate import OWN, sharded
from hf_memsave.measure.models import depth_of
from hf_memsave.measure.trace import Trace
from hf_memsave.measure.training import Training
from hf_memsave.patching.rows import ROWS
from hf_memsave.planner.rates import Rates, Work, work_of

RUNGS: tuple[Any, ...] = (None, "gate", "block")


class Family(NamedTuple):
    """Settings that differ in their number of layers alone; those without a rung are one."""

    offload: bool
    rung: Any


FLOOR = Family(False, None)
OFFLOAD = Family(True, None)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting, and what it takes."""

    config: MemSaveConfig  # to patch with
    needed: int  # bytes at the peak, with what CUDA takes for itself
    away: int  # bytes in main memory, pinned
    cost: float  # the time of the work that a step adds to stock's, as a part of stock's

    @property
    def family(self) -> Family:
        """The settings that differ from this one in their number of layers."""
        return Family(self.config.offload, self.config.checkpoint)

    @property
    def name(self) -> str:
        """What is done, in words."""
        layers = int(self.config.first_blocks("checkpoint") or 0)
        return in_words(self.family, f" in {counted(layers, 'layer')}")


def in_words(family: Family, layers: str = "") -> str:
    """What a family does, in words."""
    parts = [f"checkpoint={family.rung!r}{layers}"] if family.rung else []
    parts += ["offload"] if family.offload else []
    return ", ".join(parts) or "no product runs again"


def trace_of(config: PreTrainedConfig, training: Training, memsave: MemSaveConfig | None) -> InFull:
    """Trace a setting, or stock, at the depth of the configuration."""
    return trace_in_full(config, depth_of(config), training, memsave, keeps=False)


@dataclass(frozen=True)
class Settings:
    """The settings of one model and step; what has to be traced is traced when it is asked for."""

    config: PreTrainedConfig
    training: Training
    shards: tuple[str, int]
    base: MemSaveConfig
    rates: Rates
    _wholes: dict[Family, InFull] = field(default_factory=dict, init=False)

    @cached_property
    def work(self) -> Work:
        """The operations of a step."""
        return work_of(self.config, self.training)

    @cached_property
    def stacks(self) -> list[str]:
        """The field of the configuration that counts it, for each layer."""
        return [field for field, layers in depth_of(self.config).items() for _ in range(layers)]

    def families(self) -> list[Family]:
        """All that may be used."""
        rungs = (*RUNGS, "tiles") if self.training.seq_len > ROWS else RUNGS
        return [Family(offload, rung) for offload in (False, True) for rung in rungs]

    def stock(self) -> dict[str, tuple[int, float]]:
        """Stock, and stock with gradient checkpointing, which runs forward again -> bytes needed, and the cost."""
        again = self.work.forward / (self.work.forward + self.work.backward)
        ways = {"stock": (self.training, 0.0)}
        if not self.training.checkpointing:
            ways["stock, gradient checkpointing"] = replace(self.training, checkpointing=True), again
        found = {}
        for name, (training, cost) in ways.items():
            with contextlib.suppress(MeasureError):  # of a model that cannot be checkpointed
                trace = sharded(trace_of(self.config, training, None).trace, *self.shards)
                found[name] = trace.peak + OWN, cost
        return found

    def whole(self, family: Family) -> Setting:
        """The rung in all layers."""
        return self._setting(family, len(self.stacks) if family.rung else 0)

    def of(self, family: Family) -> Iterator[Setting]:
        """The rung in 1 layer, 2 layers, ..., all."""
        return (self._setting(family, layers) for layers in (range(1, len(self.stacks) + 1) if family.rung else [0]))

    def trace(self, family: Family) -> Trace:
        """The step with the family's rung in all layers, on one of the devices."""
        return sharded(self._whole(family).trace, *self.shards)

    def _whole(self, family: Family) -> InFull:
        if family not in self._wholes:
            self._wholes[family] = trace_of(self.config, self.training, self._config(family, len(self.stacks)))
        return self._wholes[family]

    def _config(self, family: Family, layers: int) -> MemSaveConfig:
        rest = dict(self.base.layers or ())
        return replace(
            self.base,
            offload=family.offload,
            checkpoint=family.rung,
            layers=(rest | {"checkpoint": layers} if family.rung else rest) or None,
        )

    def _setting(self, family: Family, layers: int) -> Setting:
        away = sum(self._mixed(family, layers, "away"))
        again = layers * self.work.again[family.rung] if family.rung else 0.0
        return Setting(
            config=self._config(family, layers),
            needed=self._peak(family, layers) + int(self.work.held(away)) + OWN,  # what has not left yet
            away=int(away),
            cost=self.work.cost(self.rates, again, away),
        )

    def _mixed(self, family: Family, layers: int, name: str) -> list[float]:
        """The bytes kept on the device "at_loss", or "away" from it, of each layer; the rung is in the first ones."""
        batches = min(self.training.accumulation, 2) if name == "away" else 1  # that were traced
        families = (family if i < layers else family._replace(rung=None) for i in range(len(self.stacks)))
        return [self._whole(f).per_layer[s][name] / batches for f, s in zip(families, self.stacks, strict=True)]

    def _peak(self, family: Family, layers: int) -> int:
        """With the rung in the first ``layers``: there a block sees what it sees where all have it."""
        if layers in (0, len(self.stacks)):
            return self.trace(family if layers else family._replace(rung=None)).peak
        plain, all_of_it = self.trace(family._replace(rung=None)), self.trace(family)
        blocks = [(stack, block) for stack, count in plain.blocks.items() for block in range(count)]
        none, some = (sum(self._mixed(family, n, "at_loss")) for n in (0, layers))
        highest = 0
        for place, moment in plain.places.items():
            if (place.stack, place.block) in blocks[:layers]:
                other = place._replace(is_after=not place.is_after)
                live = (all_of_it.places.get(place) or all_of_it.places.get(other) or moment).live
            else:
                live = moment.live - (0 if place.phase == "optimizer" else int(none - some))
            highest = max(highest, live)
        return highest
