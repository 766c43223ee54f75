"""What a training step will take of a GPU's memory, from the configuration alone: no weights, and no GPU.

A few layers are run, forward, backward and optimizer, on a stand-in for a CUDA device
(:mod:`~hf_memsave.measure.fake_device`), and every byte is counted; the full depth follows from them exactly
(:mod:`~hf_memsave.measure.depth`).

Modelled: parameters, gradients, the optimizer's states, activations, transients of forward, loss, backward and
optimizer, autocast's copies, adapters, rounding to 512 bytes, the largest work spaces of attention. Stated as
constants: :data:`CONTEXT` and :data:`WORKSPACES`. Not modelled: fragmentation, buffers of communication, and what
kernels take for themselves otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from hf_memsave.config.config import MemSaveConfig, MemSaveLike
from hf_memsave.config.sizes import GIB, MIB, bytes_of
from hf_memsave.config.wtacrs import is_int
from hf_memsave.errors import MeasureError
from hf_memsave.measure.depth import trace_in_full
from hf_memsave.measure.fake_device import without_gpus
from hf_memsave.measure.models import depth_of
from hf_memsave.measure.trace import Moment, Place, Point, Trace, timeline
from hf_memsave.measure.training import Training, config_of, training_of

#: What CUDA takes for itself in each process, in no allocator; it depends on device and driver.
CONTEXT = 500 * MIB
#: What cuBLAS takes: by PyTorch's default 8.1 MiB for the thread of the forward, and for that of the backward.
WORKSPACES = 2 * (4096 * 2 + 16 * 8) * 1024
#: Name -> which of parameters, gradients and states are divided by the number of devices. FSDP (and ZeRO-3) gathers
#: the parameters of the block that runs, and of the next one beside it, and has one block's gradients whole until they
#: are reduced. What lies outside of blocks is gathered as one more unit.
SHARDINGS = {
    "ddp": (False, False, False),
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    "fsdp": (True, True, True),
}
#: More is not asked for; nor, at once, for so many times what was asked for before: a batch of ids is made of it.
_MOST, _GROWTH = 2**22, 64


@dataclass(frozen=True, kw_only=True)
class Memory:
    """One step's memory on one device, in bytes."""

    peak: int  # the most that PyTorch's allocator has given out at once
    where: str  # the moment of the step at which that is
    parameters: int  # with buffers
    gradients: int  # of them, at the peak
    states: int  # of the optimizer
    activations: int  # whatever else is alive at the peak: what is kept, and transients
    kept: int  # between forward and backward
    by_kind: dict[str, int]  # kept bytes by kind of op
    by_module: dict[str, int]  # kept bytes by module, "*" for the number of a block
    per_layer: dict[str, float]  # kept bytes that each layer adds, by field of the configuration
    timeline: tuple[Point, ...]  # the highest moment of each part of the step, in order

    @property
    def needed(self) -> int:
        """What a GPU must have: the peak, and what CUDA and cuBLAS take."""
        return self.peak + WORKSPACES + CONTEXT


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What :func:`estimate` found; ``str()`` of it is a table."""

    model: str  # its type, and its depth by field of the configuration
    depth: dict[str, int]  # field of the configuration -> number of layers
    numbers: dict[str, int]  # how many "parameters" there are, and how many are "trained"
    u: int  # bytes of one activation ``[batch, seq, hidden]``
    stock: Memory  # without hf_memsave
    patched: Memory | None  # with it; None where that was not asked for
    memory: int | None = None  # the limit in bytes; None if none was given

    @property
    def fits(self) -> bool | None:
        """Whether the step, patched where that was asked for, needs no more than ``memory``."""
        return None if self.memory is None else (self.patched or self.stock).needed <= self.memory

    def to_dict(self) -> dict[str, Any]:
        """Plain data, in bytes."""
        return dataclasses.asdict(self) | {"fits": self.fits}

    def __str__(self) -> str:
        columns = [self.stock] + ([self.patched] if self.patched else [])
        rows = [("", "stock", *(["patched"] if self.patched else []))]
        names = {name: name for name in ("parameters", "gradients", "states", "activations", "peak")}
        names |= {"needed": "needed, with CUDA's own", "kept": "kept for backward"}
        for name, words in names.items():
            rows.append((words, *(_gib(getattr(m, name)) for m in columns)))
        for field in self.depth:
            rows.append((f"u a layer ({field})", *(f"{m.per_layer[field] / self.u:.2f}" for m in columns)))
        layers = " + ".join(map(str, self.depth.values()))
        title = f"{self.model}, {layers} layers, {self.numbers['parameters'] / 1e6:,.1f} M parameters"
        lines = [f"{name:<30}" + "".join(f"{cell:>14}" for cell in cells) for name, *cells in rows]
        where = "; ".join(dict.fromkeys(f"the peak is {m.where}" for m in columns))
        fits = [] if self.memory is None else [f"{'Fits' if self.fits else 'Does not fit'} in {_gib(self.memory)}."]
        return "\n".join([title, *lines, where, *fits])


def estimate(
    model_or_config: str | PreTrainedConfig | nn.Module, *, batch_size: int, seq_len: int, memsave: MemSaveLike = True,
    memory: int | str | None = None, devices: int = 1, sharding: str = "ddp", layers: int | None = None,
    progress: Callable[[float], None] | None = None, **training: Any,
) -> Estimate:  # fmt: skip
    """Estimate a training step's peak memory on a CUDA device, without one.

    Args:
        model_or_config: A name on the hub, a folder, a model type, a configuration, or a model of Transformers (of
            which the configuration is read, and the dtype of its weights).
        batch_size: Sequences, on each device.
        seq_len: Tokens in each.
        memsave: As for :func:`hf_memsave.patch`; False for stock alone.
        memory: What there is, in bytes or as "24GiB".
        devices: Over how many to shard.
        sharding: "ddp", "zero1", "zero2" or "fsdp" (which is ZeRO-3 too).
        layers: The depth, instead of the configuration's own.
        progress: Told the share that is done.
        **training: Fields of :class:`~hf_memsave.measure.training.Training`: dtype, autocast, optimizer, lora,
            quantized, checkpointing, accumulation, attention, padded, holds_output. A ``lora`` may be a dict of fields
            of :class:`~hf_memsave.config.lora.Lora`.

    Returns:
        Stock's step beside the patched one.

    Raises:
        MeasureError: The model or a field is not known, or the step cannot be run.
        PlanError: ``memory`` is no size.
    """
    limit = None if memory is None else bytes_of(memory)
    if layers is not None and not (is_int(layers) and layers > 0):
        raise MeasureError(f"layers: expected a whole number from 1, or None, got {layers!r}. Change layers.")
    config = config_of(model_or_config, training)
    setting = training_of(batch_size=batch_size, seq_len=seq_len, **training)
    resolved = MemSaveConfig.resolve(memsave)
    depth = depth_of(config, layers)
    tell = progress or (lambda share: None)
    tell(0)
    stock, per_layer = trace_in_full(config, depth, setting, None)
    patched = None
    if resolved is not None:
        tell(0.3)
        patched = _memory(*trace_in_full(config, depth, setting, resolved), sharding, devices)
    tell(1)
    return Estimate(
        model=config.model_type,
        depth=depth,
        numbers=stock.numbers,
        u=batch_size * seq_len * config.hidden_size * setting.u_dtype.itemsize,
        stock=_memory(stock, per_layer, sharding, devices),
        patched=patched,
        memory=limit,
    )


def _memory(full: Trace, per_layer: dict[str, dict[str, float]], sharding: str, devices: int) -> Memory:
    trace = sharded(full, sharding, devices)
    place, highest = max(trace.places.items(), key=lambda item: item[1].live)
    op = highest.op.removeprefix("aten.").partition(".")[0]
    return Memory(
        peak=highest.live,
        where=f"in the {place.phase}{f' {place.where}' if place.stack else ''}, in {op}",
        parameters=trace.parameters,
        gradients=highest.gradients,
        states=trace.states,
        activations=highest.live - trace.parameters - highest.gradients - trace.states,
        kept=trace.kept,
        by_kind=trace.by_kind,
        by_module=trace.by_module,
        per_layer={field: added["kept"] for field, added in per_layer.items()},
        timeline=timeline(trace),
    )


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:,.2f} GiB"


def sharded(trace: Trace, name: str, devices: int) -> Trace:
    """The part of a step on one of N devices; MeasureError for another name or number."""
    if name not in SHARDINGS or not isinstance(devices, int) or devices < 1:
        raise MeasureError(
            f"sharding: expected {' or '.join(SHARDINGS)} over 1 device or more, got {name!r} over {devices!r}. "
            "Leave it out for one device."
        )
    if devices == 1:
        return trace
    parameters, gradients, states = (devices if is_divided else 1 for is_divided in SHARDINGS[name])
    outside = max(0, trace.parameters - sum(n * trace.of_block[stack] for stack, n in trace.blocks.items()))
    largest = max(trace.of_block.values(), default=outside)

    def moment(place: Place, whole: Moment) -> Moment:
        rest = whole.live - trace.states - trace.parameters - whole.gradients
        mine = whole.gradients // gradients
        if place.phase == "optimizer":
            rest //= states  # it updates what it has states of
        elif parameters > 1:
            rest += outside + 2 * largest
        if gradients > 1 and place.phase == "backward":
            mine = min(whole.gradients, mine + largest * trace.trained // max(1, trace.parameters))
        live = rest + mine + trace.states // states + trace.parameters // parameters
        return whole._replace(live=live, gradients=mine)

    return replace(
        trace,
        places={place: moment(place, whole) for place, whole in trace.places.items()},
        parameters=trace.parameters // parameters,
        trained=trace.trained // gradients,
        states=trace.states // states,
    )


@without_gpus
def largest(
    config: PreTrainedConfig, depth: dict[str, int], training: Training, memsave: MemSaveConfig | None, name: str,
    memory: int, sharding: tuple[str, int], estimated: Memory,
) -> int:  # fmt: skip
    """The largest "batch_size" or "seq_len" that fits, where that of ``training`` needs what was estimated; or 0."""
    start = getattr(training, name)

    def needed(number: int) -> int:
        if number == start:
            return estimated.needed
        fields: dict[str, Any] = {name: number}
        trace, _ = trace_in_full(config, depth, replace(training, **fields), memsave, keeps=False)
        return sharded(trace, *sharding).peak + WORKSPACES + CONTEXT

    fixed = estimated.parameters + estimated.states + WORKSPACES + CONTEXT
    return search(needed, memory, start, most_of(config, name), fixed)


def most_of(config: PreTrainedConfig, name: str) -> int:
    """The largest "batch_size" or "seq_len" to ask about."""
    return _MOST if name == "batch_size" else getattr(config, "max_position_embeddings", None) or _MOST


def search(needed: Callable[[int], int], memory: int, start: int, most: int, fixed: int = 0) -> int:
    """The largest number up to ``most`` for which ``needed`` is at most ``memory``; 0 if not even 1 is."""
    # ``needed`` rises about evenly from ``fixed``; each question costs seconds, and none is asked twice.
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
