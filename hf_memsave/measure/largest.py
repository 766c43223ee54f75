"""Find the largest batch, or the longest sequence, whose training step fits, by a few traces."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from hf_memsave.config.config import MemSaveConfig
from hf_memsave.errors import MeasureError
from hf_memsave.measure.depth import FROM, depths_for, trace_in_full
from hf_memsave.measure.fake_device import without_gpus
from hf_memsave.measure.figures import OWN, Trace
from hf_memsave.measure.models import at_depth, most_tokens
from hf_memsave.measure.training import Training
from hf_memsave.tape.decide import SPAN

#: The largest number to try, and by how much one may exceed the last that fit: a batch of ids is made for each.
MOST, _GROWTH = 2**22, 64
#: The range is halved at every so many tries, as the memory may be far from linear.
_HALVED = 7


@without_gpus
def largest(
    config: PreTrainedConfig, depth: dict[str, int], training: Training, memsave: MemSaveConfig | None, name: str,
    memory: int, sharding: tuple[str, int],
) -> int:  # fmt: skip
    """Return the largest "batch_size" or "seq_len" with which a step fits, or 0; begin with ``training``'s own."""
    few = depths_for(config, depth, FROM, SPAN).run
    is_shallow = sum(sum(at.values()) for at in few) >= sum(depth.values())  # the whole model takes no longer
    step = (at_depth(config, depth), {}) if is_shallow else (config, depth)
    first = trace_in_full(config, depth, training, memsave).sharded(*sharding)

    def plain(number: int) -> Trace:
        """Trace the step with an optimizer without states or temporaries, which are the same for any number."""
        changes: dict[str, Any] = {name: number, "optimizer": "sgd"}
        return trace_in_full(*step, replace(training, **changes), memsave).sharded(*sharding)

    def needed(number: int) -> int:
        if number == getattr(training, name):
            return first.needed
        trace, start = plain(number), plain(getattr(training, name))
        more = trace.in_optimizer - start.in_optimizer  # the batch, and an output that is held
        return max(trace.in_passes + first.states, first.in_optimizer + more) + OWN

    return largest_of(needed, config, name, getattr(training, name), memory, first.fixed + OWN)


def largest_of(
    needed: Callable[[int], int], config: PreTrainedConfig, name: str, start: int, memory: int, fixed: int
) -> int:
    """Return the largest "batch_size", or "seq_len" (of 8, 16, ...), that needs no more than ``memory``; or 0."""
    if name == "batch_size":
        return search(needed, memory, start, MOST, {0: fixed})
    # Kernels pad tokens to a multiple of 8, so others may need more than the next one. A step with more tokens than the
    # configuration names positions for was run: it has no table of them.
    positions = most_tokens(config)
    most = (MOST if start > positions else min(positions, MOST)) // 8
    return 8 * search(lambda n: needed(8 * n), memory, max(1, start // 8), most, {0: fixed})


def search(needed: Callable[[int], int], memory: int, start: int, most: int, given: Mapping[int, float] = {}) -> int:
    """Return the largest number up to ``most`` for which ``needed``, which rises, is at most ``memory``; or 0."""
    # Each question takes seconds. The next number is the last that fits by the line and by the parabola through the
    # nearest answers; the last two are one that fits, and the next one. A MeasureError: no model takes so much.
    known = dict(given)  # what is needed for a number
    low, high, guess = 0, most + 1, min(start, most)

    def is_too_much(number: int) -> bool:
        nearest = sorted(known, key=lambda n: abs(n - number))
        return any(predicted(number, nearest[:count]) > memory for count in (2, 3))

    def predicted(number: int, by: list[int]) -> float:
        return sum(known[a] * math.prod((number - b) / (a - b) for b in by if b != a) for a in by)

    while high - low > 1:
        try:
            known[guess] = needed(guess)
        except MeasureError:
            if not low:
                raise
            high, guess = guess, (low + guess) // 2
            continue
        low, high = (guess, high) if known[guess] <= memory else (low, guess)
        guess = 2 * low or high // 2
        if len(known) > 1:
            guess = low + bisect_left(range(low + 1, high), True, key=is_too_much)
        if len(known) % _HALVED == 0 and high <= most:
            guess = (low + high) // 2
        guess = max(low + 1, min(guess, high - 1, _GROWTH * max(low, start)))
    return low
