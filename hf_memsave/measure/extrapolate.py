r"""A step of a deep model, from steps of shallow ones.

The blocks of a stack are alike, after p of them at the latest. So at the same moment of a block counted from the first
one, or from the last one, a model with p layers more has so many bytes more alive, whatever its depth::

    live(L) = live(d) + (L - d) / p * (live(d + p) - live(d))

and of the blocks between, each has a number of bytes between those of its neighbours: the highest moment of all is
found among the first and the last ones. An encoder and a decoder have a term each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from hf_memsave.config import MemSaveConfig
from hf_memsave.errors import MeasureError
from hf_memsave.measure.layers import period
from hf_memsave.measure.trace import Moment, Place, Trace
from hf_memsave.tape.price import SPAN

if TYPE_CHECKING:
    from hf_memsave.measure.training import Training

#: From which layer on those of a tape are alike, and after how many they repeat themselves at the latest.
FROM, REPEATS = SPAN + 2, SPAN * (SPAN + 1)
#: From which on those of stock are alike.
_FROM_STOCK = 3


@dataclass(frozen=True)
class Depths:
    """The depths that tell of the full one. All are numbers of layers, by field of the configuration.

    Attributes:
        full: What is wanted.
        first: The first to run.
        every: How many more of each stack in turn the deeper ones have: after so many, layers repeat themselves.
    """

    full: dict[str, int]
    first: dict[str, int]
    every: dict[str, int]

    @property
    def run(self) -> tuple[dict[str, int], ...]:
        """The first depth, and one with more layers of each stack in turn."""
        return (self.first, *(self.first | {field: self.first[field] + n} for field, n in self.every.items()))

    @property
    def times(self) -> list[int]:
        """How often what each of the deeper ones has more is there at full depth."""
        return [(self.full[field] - self.first[field]) // n for field, n in self.every.items()]


def periods(config: PreTrainedConfig, full: Mapping[str, int]) -> dict[str, int]:
    """After how many layers the types in each stack repeat themselves; only the first stack may have several."""
    return {field: period(config) if i == 0 else 1 for i, field in enumerate(full)}


def depths_of(
    config: PreTrainedConfig, full: dict[str, int], training: Training, memsave: MemSaveConfig | None
) -> Depths:
    """The depths to trace for a full one: that itself as the first, where it has too few layers to tell of more.

    Where an fp32 residual sum runs beside products in 16 bits, a tape keeps one after every s-th or next layer, with s
    :data:`~hf_memsave.tape.price.SPAN`; elsewhere each layer keeps as much as the others.

    Returns:
        Them.
    """
    own = periods(config, full)
    has_sums = memsave is not None and bool(training.autocast or training.quantized)
    every = {field: math.lcm(REPEATS if has_sums else 1, n) for field, n in own.items()}
    least = {field: max(_FROM_STOCK if memsave is None else FROM, n) for field, n in own.items()}
    first = {f: n if n < least[f] else least[f] + (n - least[f]) % every[f] for f, n in full.items()}
    return Depths(full, first, every)


def extrapolated(first: Any, deeper: Sequence[Any], times: Sequence[int]) -> Any:
    """A number, or a dict of numbers, at full depth.

    Args:
        first: At the first depth.
        deeper: With more layers of each stack in turn.
        times: How often what each of them has more is there at full depth.

    Returns:
        The same kind of thing.
    """
    if isinstance(first, Mapping):
        names = dict.fromkeys([*first, *(name for other in deeper for name in other)])
        return {n: extrapolated(first.get(n, 0), [other.get(n, 0) for other in deeper], times) for n in names}
    return first + sum(n * (other - first) for other, n in zip(deeper, times, strict=True))


def trace_at_full_depth(first: Trace, deeper: Sequence[Trace], times: Sequence[int]) -> Trace:
    """The step at full depth, its first blocks and its last ones, by :func:`extrapolated` of each moment.

    Returns:
        Its highest moments.

    Raises:
        MeasureError: The blocks are not alike.
    """

    def of(get: Callable[[Trace], Any]) -> Any:
        return extrapolated(get(first), [get(trace) for trace in deeper], times)

    blocks = of(lambda trace: trace.blocks)
    places: dict[Place, Moment] = {}
    for place in first.places:
        for is_from_end in _ends(place, first.blocks):

            def moment(trace: Trace, place: Place = place, is_from_end: bool = is_from_end) -> Moment:
                return trace.places[_same(place, first.blocks, trace.blocks, is_from_end)]

            try:
                found = of(lambda trace, moment=moment: moment(trace)._asdict() | {"op": 0})  # type: ignore[misc]
            except KeyError as error:
                raise MeasureError(
                    f"the blocks of {place.stack or 'the model'} are not alike: a deeper one has no {error}. Measure "
                    "the model as it is, with hf_memsave.measure.peak.count_peak."
                ) from error
            places[_same(place, first.blocks, blocks, is_from_end)] = Moment(
                found["live"], found["gradients"], first.places[place].op, found["away"]
            )
    return Trace(
        places=places,
        blocks=blocks,
        parameters=of(lambda trace: trace.parameters),
        trained=of(lambda trace: trace.trained),
        states=of(lambda trace: trace.states),
        owned=first.owned,
    )


def with_a_block_less(trace: Trace, temporaries: int) -> Trace:
    """The step of a model with one block fewer, from one step alone.

    A block in the middle is taken out. What it owns is alive no more; nor, where it has run forward and not yet
    backward, what it keeps, which is by how much more is alive in the block after it.

    Args:
        trace: Of a model with one stack of blocks that are alike and are patched alike, of one batch, without a held
            output, and without autocast, whose casts of weights live in forward alone.
        temporaries: What the optimizer's step takes at once, of the bytes of the gradients.

    Returns:
        What a trace of that model is.
    """
    ((stack, blocks),) = trace.blocks.items()
    gone = (blocks - 1) // 2
    parameters, trained, states = trace.owned[stack, gone]

    def more(phase: str, what: str) -> int:
        before, behind = (trace.places[Place(phase, stack, block)] for block in (gone, gone + 1))
        return int(getattr(behind, what) - getattr(before, what))

    kept = {"forward": more("forward", "live"), "backward": more("backward", "live") + trained}
    places = {}
    for place, moment in trace.places.items():
        if place.stack and place.block == gone:
            continue
        is_between = place.block > gone if place.stack else place.phase == "backward"  # the two runs of that block
        live, gradients, away = moment.live - parameters - states, moment.gradients, moment.away
        if is_between:
            live -= kept[place.phase]
        elif place.phase != "forward":
            live, gradients = live - trained, gradients - trained
        if place.phase == "optimizer":
            live -= temporaries * trained
        if is_between or place.phase != "forward":
            away -= more("forward", "away")
        there = place._replace(block=place.block - 1) if place.stack and is_between else place
        places[there] = moment._replace(live=live, gradients=gradients, away=away)
    return replace(
        trace,
        places=places,
        blocks={stack: blocks - 1},
        parameters=trace.parameters - parameters,
        trained=trace.trained - trained,
        states=trace.states - states,
    )


def _ends(place: Place, blocks: Mapping[str, int]) -> list[bool]:
    """From which ends to count: the last block may be unlike the others, counted from the first, and the reverse."""
    if not place.stack:
        return [False]
    is_last = place.block == blocks[place.stack] - 1
    is_late = place.block >= max(1, blocks[place.stack] // 2)  # what an early one builds on is not there yet
    return [*([] if is_last else [False]), *([True] if is_last or is_late else [])]


def _same(place: Place, mine: Mapping[str, int], theirs: Mapping[str, int], is_from_end: bool) -> Place:
    more = theirs[place.stack] - mine[place.stack] if is_from_end else 0
    return place._replace(block=place.block + more)
