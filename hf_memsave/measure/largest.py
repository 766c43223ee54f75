"""The largest batch, or the longest sequence, whose step fits: found by few traces."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from hf_memsave.config.config import MemSaveConfig
from hf_memsave.errors import MeasureError
from hf_memsave.measure.depth import trace_in_full
from hf_memsave.measure.estimate import OWN, sharded
from hf_memsave.measure.fake_device import without_gpus
from hf_memsave.measure.models import most_tokens
from hf_memsave.measure.trace import Moment, Place, Trace
from hf_memsave.measure.training import Training

#: More is not asked for; nor, at once, for so many times what was asked for before: a batch of ids is made of it.
_MOST, _GROWTH = 2**22, 64


@without_gpus
def largest(
    config: PreTrainedConfig, depth: dict[str, int], training: Training, memsave: MemSaveConfig | None, name: str,
    memory: int, sharding: tuple[str, int],
) -> int:  # fmt: skip
    """The largest "batch_size" or "seq_len" with which a step fits, found from that of ``training``; or 0."""

    def run(number: int) -> tuple[Trace, int]:
        changes: dict[str, Any] = {name: number}
        trace, _ = trace_in_full(config, depth, replace(training, **changes), memsave, keeps=False)
        return sharded(trace, *sharding), OWN

    return largest_of(run, config, name, getattr(training, name), memory)


def largest_of(
    run: Callable[[int], tuple[Trace, int]], config: PreTrainedConfig, name: str, start: int, memory: int
) -> int:
    """The largest "batch_size", or "seq_len" (of 8, 16, ...), whose step fits, with the bytes beside its peak; or 0."""
    degree = 1 if name == "batch_size" else 2
    traces: dict[int, Trace] = {}
    beside = 0

    def needed(number: int) -> int:
        nonlocal beside
        traces[number], beside = run(number)
        return traces[number].peak + beside

    def predicted(number: int) -> float:  # as the bytes of each place lie on a polynomial of this degree
        near = sorted(traces, key=lambda known: abs(known - number))[: degree + 1]
        first, at_zero = traces[near[0]], 0.0
        weights = {a: math.prod((number - b) / (a - b) for b in near if b != a) for a in near}
        if len(near) <= degree:  # with the number 0 there is what has no size of the batch
            power = (1 + degree) / (1 + len(near))  # of the first, between a line and a parabola
            weights = {a: weight * (number / a) ** power for a, weight in weights.items()}
            at_zero = 1 - sum(weights.values())

        def live(place: Place, moment: Moment) -> float:
            fixed = moment.live if place.phase == "optimizer" else first.parameters + first.states + moment.gradients
            return at_zero * fixed + sum(w * traces[a].places.get(place, moment).live for a, w in weights.items())

        return beside + max(live(*one) for one in first.places.items())

    if name == "batch_size":
        return search(needed, memory, start, _MOST, predicted)
    # Kernels pad tokens to a multiple of 8, so others may need more than the next one. A step with more tokens than the
    # configuration names positions for was run: it has no table of them.
    positions = most_tokens(config)
    most = (_MOST if start > positions else min(positions, _MOST)) // 8
    return 8 * search(lambda n: needed(8 * n), memory, max(1, start // 8), most, lambda n: predicted(8 * n))


def search(needed: Callable[[int], int], memory: int, start: int, most: int, predicted: Callable[[int], float]) -> int:
    """The largest number up to ``most`` for which ``needed`` is at most ``memory``; 0 if not even 1 is."""
    # Each question costs seconds, and none is asked twice. ``needed`` rises about as ``predicted`` by what was asked.
    # One number more is not asked about where its predicted excess is larger than the last prediction's error.
    asked: dict[int, int] = {}
    low, high, guess = 0, most + 1, min(start, most)
    while high - low > 1:
        expected = predicted(guess) if low else math.inf
        try:
            asked[guess] = needed(guess)
        except MeasureError:  # beyond what the model takes
            if not low:
                raise
            high = guess
            guess = (low + high) // 2
            continue
        if asked[guess] <= memory:
            low = guess
        else:
            high = guess
        if low == guess and low + 1 < high and predicted(low + 1) - memory > abs(expected - asked[low]):
            break
        guess = low + bisect_left(range(low + 1, high), True, key=lambda n: predicted(n) > memory)
        guess = (low + high) // 2 if len(asked) % 9 == 8 else min(guess, _GROWTH * max(low, start))
        guess = min(max(guess, low + 1), high - 1)
    return low
