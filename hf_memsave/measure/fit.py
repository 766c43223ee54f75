"""The largest batch and the longest sequence whose training step fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from hf_memsave.config.config import MemSaveConfig
from hf_memsave.errors import MeasureError
from hf_memsave.measure.depth import trace_in_full
from hf_memsave.measure.estimate import CONTEXT, WORKSPACES, Memory
from hf_memsave.measure.sharding import sharded
from hf_memsave.measure.training import Training
from hf_memsave.measure.without_gpus import without_gpus

#: More is not asked for; nor, at once, for so many times what was asked for before: a batch of ids is made of it.
_MOST, _GROWTH = 2**22, 64


@without_gpus
def largest(
    config: PreTrainedConfig, depth: dict[str, int], training: Training, memsave: MemSaveConfig | None, name: str,
    memory: int, sharding: tuple[str, int] = ("ddp", 1), estimated: Memory | None = None,
) -> int:  # fmt: skip
    """The largest "batch_size" or "seq_len" that fits, all else as it is; 0 if not even 1 fits."""
    start = getattr(training, name)

    def needed(number: int) -> int:
        if estimated is not None and number == start:
            return estimated.needed
        fields: dict[str, Any] = {name: number}
        trace, _ = trace_in_full(config, depth, replace(training, **fields), memsave, keeps=False)
        return sharded(trace, *sharding).peak + WORKSPACES + CONTEXT

    fixed = 0 if estimated is None else estimated.parameters + estimated.states + WORKSPACES + CONTEXT
    return search(needed, memory, start, most_of(config, name), fixed)


def most_of(config: PreTrainedConfig, name: str) -> int:
    """The largest "batch_size" or "seq_len" to ask about."""
    return _MOST if name == "batch_size" else getattr(config, "max_position_embeddings", None) or _MOST


def search(needed: Callable[[int], int], memory: int, start: int, most: int, fixed: int = 0) -> int:
    """The largest number up to ``most`` for which ``needed`` is at most ``memory``; 0 if not even 1 is.

    Args:
        needed: What a number needs, rising about evenly; each question costs seconds, and none is asked twice.
        memory: What there is.
        start: A number to begin with.
        most: The largest number that is allowed.
        fixed: About what is needed whatever the number.

    Returns:
        The number.

    Raises:
        MeasureError: No number can be asked about.
    """
    asked: dict[int, int] = {}
    low, high, guess = 0, most + 1, min(start, most)
    while high - low > 1:
        try:
            asked[guess] = needed(guess)
        except MeasureError:  # beyond what the model takes
            if not low:
                raise
            asked[guess] = 2 * memory
        if asked[guess] <= memory:
            low = guess
        else:
            high = guess
        guess = min(max(_on_the_line(asked, memory, low, high, fixed), low + 1), high - 1)
    return low


def _on_the_line(asked: dict[int, int], memory: int, low: int, high: int, fixed: int) -> int:
    """Where a line through the two numbers asked about last meets ``memory``; if there is none, another number."""
    if not low:
        return 1
    if len(asked) < 2:
        return min(int(low * (memory - fixed) / max(1, asked[low] - fixed)), _GROWTH * low)
    (a, cost_a), (b, cost_b) = list(asked.items())[-2:]
    if cost_a == cost_b:
        return (low + high) // 2
    return int(a + (memory - cost_a) * (b - a) / (cost_b - cost_a))
