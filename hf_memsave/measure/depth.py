r"""Extrapolate the figures of a model at its full depth from shallow ones.

The layers of a stack repeat after p of them at the latest. So every figure of a model (kept bytes of one kind,
parameters, the bytes alive at one moment of a block counted from the first or from the last one) is affine in the
depth L, and two depths determine it::

    n(L) = n(d) + (L - d) / p * (n(d + p) - n(d))

An encoder and a decoder have a term each. The bytes of a middle block lie between those of its neighbours, so the
highest moment of a step is among the first and the last blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedConfig

from hf_memsave.config.config import MemSaveConfig
from hf_memsave.measure.figures import Moment, Place, Trace
from hf_memsave.measure.models import DepthError, at_depth, count_parameters, depth_of, period, text_head
from hf_memsave.measure.training import Training, trace_at
from hf_memsave.tape.decide import SPAN

#: Patched: the layer from which layers are alike, and their period. Under autocast a tape keeps a residual sum after
#: every SPAN-th or next block, and recomputes those between; without it, in Gemma, after every SPAN-th.
FROM, REPEATS = SPAN + 2, SPAN * (SPAN + 1)
#: Stock: the layer from which layers, and so the peak of a step, are alike.
_FROM_STOCK = 3


@dataclass(frozen=True)
class Depths:
    """The depths to trace for the figures at full depth: numbers of layers by field of the configuration."""

    full: dict[str, int]  # the depth to extrapolate to
    first: dict[str, int]  # the shallowest one to trace
    every: dict[str, int]  # the period of each stack, by which a deeper trace has more of its layers

    @property
    def run(self) -> tuple[dict[str, int], ...]:
        """The first depth, and for each stack one that is a period deeper."""
        return (self.first, *(self.first | {field: self.first[field] + n} for field, n in self.every.items()))

    def carried(self, points: Sequence[Any]) -> Any:
        """Extrapolate a number, or a dict of numbers, to full depth from ``points``, its values at :attr:`run`."""
        first, *deeper = points
        if isinstance(first, Mapping):
            return {n: self.carried([p.get(n, 0) for p in points]) for n in {n: 0 for point in points for n in point}}
        times = [(self.full[field] - self.first[field]) // n for field, n in self.every.items()]
        return first + sum(n * (other - first) for other, n in zip(deeper, times, strict=True))


def depths_for(config: PreTrainedConfig, full: dict[str, int], least: int, repeats: int) -> Depths:
    """Return depths to trace, from ``least`` layers on (or all, if fewer), with periods that ``repeats`` divides."""
    own = {field: period(config) if i == 0 else 1 for i, field in enumerate(full)}  # the first stack may have types
    every = {field: math.lcm(repeats, n) for field, n in own.items()}
    start = {field: max(least, n) for field, n in own.items()}
    first = {f: n if n < start[f] else start[f] + (n - start[f]) % every[f] for f, n in full.items()}
    return Depths(full, first, every)


def with_depth(config: PreTrainedConfig, layers: int | None = None) -> tuple[PreTrainedConfig, dict[str, int]]:
    """Return the configuration with ``layers``, and its depth by field, empty if figures cannot be extrapolated."""
    if layers:
        config = at_depth(config, depth_of(config, layers))
    try:
        depth = depth_of(config) if text_head(config) is not None else {}
        whole = count_parameters(config)
        for how in ((_FROM_STOCK, 1), (FROM, SPAN), (FROM, REPEATS)):
            depths = depths_for(config, depth, *how)
            if depths.carried([count_parameters(at_depth(config, at)) for at in depths.run]) != whole:
                return config, {}
        return config, depth
    except DepthError:
        return config, {}


#: A cache: the arguments of :func:`trace_in_full` -> its trace.
_KNOWN: dict[Any, Trace] = {}


def trace_in_full(
    config: PreTrainedConfig, depth: dict[str, int], training: Training, memsave: MemSaveConfig | None
) -> Trace:
    """Trace a step at full depth, from few layers where they are alike, or whole for no ``depth``; keep the trace."""
    key = type(config), config.to_json_string(use_diff=False), tuple(depth.items()), training, memsave
    if key not in _KNOWN:
        _KNOWN[key] = trace_few(config, depth, training, memsave)
    return _KNOWN[key]


def trace_few(
    config: PreTrainedConfig, depth: dict[str, int], training: Training, memsave: MemSaveConfig | None
) -> Trace:
    """Trace a step as :func:`trace_in_full` does, without its cache."""
    least, repeats = FROM, SPAN
    if memsave is None:
        least, repeats = _FROM_STOCK, 1
    else:
        least += int(max(dict(memsave.layers or ()).values(), default=0))  # the first layers are unlike the others
        if training.autocast or training.quantized:  # an fp32 residual sum runs beside products in 16 bits
            repeats = REPEATS
    try:
        depths = depths_for(config, depth, least, repeats)
        return trace_at_full_depth([trace_at(config, at, training, memsave) for at in depths.run], depths)
    except DepthError:
        return trace_at(at_depth(config, depth), {}, training, memsave)


def trace_at_full_depth(traces: Sequence[Trace], depths: Depths) -> Trace:
    """Extrapolate traces at ``depths.run`` to the first and last blocks of the full depth; DepthError if unlike."""
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
                raise DepthError(f"the blocks of {place.stack or 'the model'} are not alike: no {error}.") from error
            found = depths.carried([moment._asdict() | {"op": 0} for moment in moments])
            places[_moved(place, end, blocks)] = Moment(**found | {"op": moments[0].op})
    names = ("parameters", "trained", "states", "flops", "numbers", "by_kind", "by_module", "sites")
    figures = {name: depths.carried([getattr(trace, name) for trace in traces]) for name in names}
    recorded = ("kept", "at_loss", "away", "flops")  # how much each layer adds to these
    added = {
        field: {name: (getattr(deeper, name) - getattr(first, name)) / n for name in recorded}
        for (field, n), deeper in zip(depths.every.items(), traces[1:], strict=True)
    }
    return replace(first, places=places, blocks=blocks, per_layer=added, depths=depths.run, **figures)


def _moved(place: Place, end: int, blocks: Mapping[str, int]) -> Place:
    """Return ``place`` in a model of ``blocks``: with an ``end`` other than 0, at its distance from the last block."""
    return place._replace(block=place.block + blocks[place.stack] - end) if end else place
