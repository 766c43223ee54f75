"""A step at full depth, and what each layer keeps in it: from steps of a few layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from transformers import PreTrainedConfig

from hf_memsave.config import MemSaveConfig
from hf_memsave.measure.elsewhere import away_from_gpus
from hf_memsave.measure.extrapolate import depths_of, trace_at_full_depth, with_a_block_less
from hf_memsave.measure.layers import depth_fields
from hf_memsave.measure.optimizers import TEMPORARIES
from hf_memsave.measure.trace import Place, Trace
from hf_memsave.measure.training import Training, trace_at

#: Steps that are remembered: as many as a few plans ask for.
_REMEMBERED = 256


@dataclass(frozen=True)
class Whole:
    """One setting in all layers: the step at full depth, and what one layer of each stack keeps for backward.

    That is ``kept`` in bytes on the device, and ``away`` in main memory.
    """

    trace: Trace
    kept: tuple[float, ...]
    away: tuple[float, ...]


def trace_of(config: PreTrainedConfig, training: Training, memsave: MemSaveConfig) -> Whole:
    """Trace a setting at the depth of the configuration; asked for again, it costs nothing."""
    return _remembered(_Key(config, training, memsave))


class _Key:
    """The arguments, equal to others that mean the same: configurations cannot be hashed."""

    def __init__(self, config: PreTrainedConfig, training: Training, memsave: MemSaveConfig) -> None:
        self.given = config, training, memsave
        self._same = type(config), config.to_json_string(use_diff=False), training, memsave

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._same == other._same

    def __hash__(self) -> int:
        return hash(self._same)


@lru_cache(_REMEMBERED)
def _remembered(key: _Key) -> Whole:
    return _traced(*key.given)


@away_from_gpus
def _traced(config: PreTrainedConfig, training: Training, memsave: MemSaveConfig) -> Whole:
    depth = {field: getattr(config, field) for field in depth_fields(config)}
    depths = depths_of(config, depth, training, memsave)
    every, times = depths.every, depths.times
    deeper = [_at(config, at, training, memsave) for at in depths.run[1:]]
    if min(times) > 0 and _is_told_by_one(deeper, every, training, memsave):
        shallow = with_a_block_less(deeper[0], TEMPORARIES[training.optimizer])
    else:
        shallow = _at(config, depths.first, training, memsave)
    trace = trace_at_full_depth(shallow, deeper, times)
    kept, away = [], []
    for i, n in enumerate(every.values()):
        another = trace_at_full_depth(shallow, deeper, [t + (i == j) for j, t in enumerate(times)])
        kept.append((_kept(another) - _kept(trace)) / n)
        away.append((_away(another) - _away(trace)) / n / min(training.accumulation, 2))
    return Whole(trace, tuple(kept), tuple(away))


def _is_told_by_one(deeper: list[Trace], every: dict[str, int], training: Training, memsave: MemSaveConfig) -> bool:
    """Whether a step with a block fewer follows from one step.

    Blocks must be alike, patched alike, and run once each way; and nothing of them may live in forward alone, as casts
    of weights do, or from before it, as gradients of an earlier batch and keys and values of a held output do.

    Returns:
        Whether they and the training are so; on a quantized model it is not known.
    """
    is_plain = training.autocast is None and training.accumulation == 1 and training.optimizer in TEMPORARIES
    is_known = not training.holds_output and training.quantized is None
    is_one_stack = len(deeper) == len(deeper[0].blocks) == max(every.values()) == 1
    of_blocks = {owned for (_, n), owned in deeper[0].owned.items() if n > 0}
    are_patched_alike = set(dict(memsave.layers or ())) <= {"checkpoint"}
    return is_plain and is_known and is_one_stack and len(of_blocks) == 1 and are_patched_alike


def _at(config: PreTrainedConfig, depth: dict[str, int], training: Training, memsave: MemSaveConfig) -> Trace:
    return trace_at(config, depth, training, memsave, keeps=False).trace


def _away(trace: Trace) -> int:
    return max(moment.away for moment in trace.places.values())


def _kept(trace: Trace) -> int:
    """What is alive as the loss is computed, but for what lives for longer."""
    stack, blocks = list(trace.blocks.items())[-1]
    return trace.places[Place("forward", stack, blocks - 1, True)].live - trace.parameters - trace.states
