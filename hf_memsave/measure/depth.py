r"""Figures of a model at its full depth, from shallow ones.

The layers of a stack are alike, after p of them at the latest. So whatever is counted of a model (kept bytes of a kind,
parameters, the bytes alive at one moment of a block counted from the first one, or from the last one) is affine in the
depth L, and two depths tell it::

    n(L) = n(d) + (L - d) / p * (n(d + p) - n(d))

An encoder and a decoder have a term each. Of the blocks between the first ones and the last ones, each has a number of
bytes between those of its neighbours: the highest moment of a step is found among the first and the last ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from hf_memsave.config.config import MemSaveConfig
from hf_memsave.errors import MeasureError
from hf_memsave.measure.fake_device import without_gpus
from hf_memsave.measure.models import period
from hf_memsave.measure.trace import Moment, Place, Trace
from hf_memsave.measure.training import Training, trace_at
from hf_memsave.tape.price import SPAN

#: From which layer on those of a tape are alike, and after how many they repeat themselves: under autocast it keeps a
#: residual sum after every SPAN-th or next block, and recomputes those between.
FROM, REPEATS = SPAN + 2, SPAN * (SPAN + 1)
#: From which on those of stock are alike, with the peak of a step.
_FROM_STOCK = 3


@dataclass(frozen=True)
class Depths:
    """The depths that tell of the full one. All are numbers of layers, by field of the configuration."""

    full: dict[str, int]  # what is wanted
    first: dict[str, int]  # the first to run
    every: dict[str, int]  # how many more of each stack in turn the deeper ones have, after which layers repeat

    @property
    def run(self) -> tuple[dict[str, int], ...]:
        """The first depth, and one with more layers of each stack in turn."""
        return (self.first, *(self.first | {field: self.first[field] + n} for field, n in self.every.items()))

    def carried(self, points: Sequence[Any]) -> Any:
        """A number, or a dict of numbers, at full depth; ``points`` are what it is at each of :attr:`run`."""
        first, *deeper = points
        if isinstance(first, Mapping):
            return {n: self.carried([p.get(n, 0) for p in points]) for n in {n: 0 for point in points for n in point}}
        times = [(self.full[field] - self.first[field]) // n for field, n in self.every.items()]
        return first + sum(n * (other - first) for other, n in zip(deeper, times, strict=True))


@dataclass(frozen=True)
class Affine:
    """Named amounts at full depth, and the part of them that each layer of a stack adds."""

    total: dict[Any, int]
    per_layer: dict[str, dict[Any, float]]

    @classmethod
    def of(cls, points: Sequence[Mapping[Any, int]], depths: Depths) -> Affine:
        """All that the points name, each of which is what was found at one of ``depths.run``."""
        first, *deeper = points
        per_layer = {
            field: {name: (point.get(name, 0) - first.get(name, 0)) / n for name in {**first, **point}}
            for (field, n), point in zip(depths.every.items(), deeper, strict=True)
        }
        return cls(depths.carried(points), per_layer)


def depths_for(config: PreTrainedConfig, full: dict[str, int], least: int, repeats: int) -> Depths:
    """Depths from ``least`` layers on, or from the full one if it has fewer, after which layers repeat themselves."""
    own = {field: period(config) if i == 0 else 1 for i, field in enumerate(full)}  # the first stack may have types
    every = {field: math.lcm(repeats, n) for field, n in own.items()}
    start = {field: max(least, n) for field, n in own.items()}
    first = {f: n if n < start[f] else start[f] + (n - start[f]) % every[f] for f, n in full.items()}
    return Depths(full, first, every)


class InFull(NamedTuple):
    """A step at full depth, and by field what a layer adds: bytes "kept", "at_loss", and "away"."""

    trace: Trace
    per_layer: dict[str, dict[str, float]]


#: What was traced, on the stand-in device -> the step: asked for again, it costs nothing.
_KNOWN: dict[tuple[Any, bool], InFull] = {}


def trace_in_full(
    config: PreTrainedConfig, depth: dict[str, int], training: Training, memsave: MemSaveConfig | None,
    keeps: bool = True,
) -> InFull:  # fmt: skip
    """A step at full depth, from few layers; without ``keeps``, it is not counted what is kept."""
    key = type(config), config.to_json_string(use_diff=False), tuple(depth.items()), training, memsave
    found = _KNOWN.get((key, True)) or _KNOWN.get((key, keeps))
    if found is None:
        found = _KNOWN[key, keeps] = trace_few(config, depth, training, memsave, keeps)
    return found


@without_gpus
def trace_few(
    config: PreTrainedConfig, depth: dict[str, int], training: Training, memsave: MemSaveConfig | None,
    keeps: bool,
) -> InFull:  # fmt: skip
    """:func:`trace_in_full` without its memory."""
    # Where an fp32 residual sum runs beside products in 16 bits; elsewhere each layer keeps as much as the others.
    has_sums = memsave is not None and bool(training.autocast or training.quantized)
    depths = depths_for(config, depth, _FROM_STOCK if memsave is None else FROM, REPEATS if has_sums else 1)
    traces = [trace_at(config, at, training, memsave, keeps) for at in depths.run]
    points = [{"kept": t.kept, "at_loss": t.at_loss, "away": t.away} for t in traces]
    return InFull(trace_at_full_depth(traces, depths), Affine.of(points, depths).per_layer)


def trace_at_full_depth(traces: Sequence[Trace], depths: Depths) -> Trace:
    """The step at full depth, its first and its last blocks, from those at ``depths.run``; MeasureError if unlike."""
    first = traces[0]
    blocks = depths.carried([trace.blocks for trace in traces])
    places: dict[Place, Moment] = {}
    for place in first.places:
        count = first.blocks[place.stack] if place.stack else 0
        is_last = bool(count) and place.block == count - 1  # it may be unlike the others: counted from the end alone
        is_late = bool(count) and place.block >= count // 2  # what an early one builds on is not there yet
        for end in (*([] if is_last else [0]), *([count] if is_late else [])):
            try:
                moments = [trace.places[_moved(place, end, trace.blocks)] for trace in traces]
            except KeyError as error:
                raise MeasureError(
                    f"the blocks of {place.stack or 'the model'} are not alike: a deeper one has no {error}. Measure "
                    "the model as it is, with hf_memsave.count.peak.count_peak."
                ) from error
            found = depths.carried([moment._asdict() | {"op": 0} for moment in moments])
            places[_moved(place, end, blocks)] = Moment(**found | {"op": moments[0].op})
    names = ("parameters", "trained", "states", "numbers", "by_kind", "by_module")
    figures = {name: depths.carried([getattr(trace, name) for trace in traces]) for name in names}
    return replace(first, places=places, blocks=blocks, **figures)


def _moved(place: Place, end: int, blocks: Mapping[str, int]) -> Place:
    """The place in a model of these blocks, counted from the last one where there were ``end`` of them."""
    return place._replace(block=place.block + blocks[place.stack] - end) if end else place
