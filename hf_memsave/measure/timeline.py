"""The moments of a step in the order in which they come: what a picture of it shows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from hf_memsave.measure.trace import Moment, Place, Trace


@dataclass(frozen=True, kw_only=True)
class Point:
    """The highest moment in a part of a step.

    Attributes:
        phase: "forward", "backward" or "optimizer".
        where: In words, such as "block 3 of model.layers".
        live: Bytes alive.
        gradients: Bytes of gradients among them.
    """

    phase: str
    where: str
    live: int
    gradients: int


def timeline(trace: Trace) -> tuple[Point, ...]:
    """One point for each block in forward and in backward, and for what comes before and after them.

    A trace at full depth knows the first blocks and the last ones; those between lie on a line.

    Returns:
        The points, in the order of the step; the highest is the peak.
    """
    found: list[Point] = []
    for phase, stack in dict.fromkeys((place.phase, place.stack) for place in trace.places):
        if not stack:
            found.append(_point(Place(phase), trace.places[Place(phase)]))
            continue
        blocks = _filled({block: _highest(trace, Place(phase, stack, block)) for block in range(trace.blocks[stack])})
        points = [_point(Place(phase, stack, block), moment) for block, moment in blocks.items()]
        found += points if phase == "forward" else points[::-1]
        end = Place(phase, stack, trace.blocks[stack] - 1, is_after=True)
        if end in trace.places:
            found.append(_point(end, trace.places[end]))
    return tuple(found)


def _highest(trace: Trace, place: Place) -> Moment | None:
    """Of a block, and of what comes between it and the next one."""
    is_last = place.block == trace.blocks[place.stack] - 1
    after = None if is_last else trace.places.get(place._replace(is_after=True))
    known = [moment for moment in (trace.places.get(place), after) if moment is not None]
    return max(known, key=lambda moment: moment.live, default=None)


def _filled(moments: Mapping[int, Moment | None]) -> dict[int, Moment]:
    """The known ones, and those between them on a line."""
    known = {block: moment for block, moment in moments.items() if moment is not None}
    filled = dict(list(known.items())[:1])
    for (low, a), (high, b) in itertools.pairwise(known.items()):
        for block in range(low + 1, high + 1):
            share = (block - low) / (high - low)
            live, gradients = (round(x + share * (y - x)) for x, y in zip(a[:2], b[:2], strict=True))
            filled[block] = Moment(live, gradients, b.op)
    return filled


def _point(place: Place, moment: Moment) -> Point:
    return Point(phase=place.phase, where=in_words(place), live=moment.live, gradients=moment.gradients)


def in_words(place: Place) -> str:
    """Where in its phase a place is."""
    if not place.stack:
        return "" if place.phase == "optimizer" else "outside of the blocks"
    return f"{'after' if place.is_after else 'of'} block {place.block} of {place.stack}"
