"""What a training step will take of a GPU's memory, from the configuration alone: no weights, and no GPU.

A few layers are run, forward, backward and optimizer, on a stand-in for a CUDA device
(:mod:`~hf_memsave.measure.fake_device`), and every byte is counted; the full depth follows from them exactly
(:mod:`~hf_memsave.measure.extrapolate`).

Modelled: parameters, gradients, the optimizer's states, activations, transients of forward, loss, backward and
optimizer, autocast's copies, adapters, rounding to 512 bytes, the largest work spaces of attention. Stated as
constants: :data:`CONTEXT` and :data:`WORKSPACES`. Not modelled: fragmentation, buffers of communication, and what
kernels take for themselves otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from hf_memsave.config import MemSaveConfig, MemSaveLike
from hf_memsave.errors import MeasureError
from hf_memsave.measure.elsewhere import away_from_gpus
from hf_memsave.measure.extrapolate import depths_of, extrapolated, trace_at_full_depth
from hf_memsave.measure.layers import depth_fields
from hf_memsave.measure.sharding import sharded
from hf_memsave.measure.timeline import Point, in_words, timeline
from hf_memsave.measure.trace import Place
from hf_memsave.measure.training import Traced, Training, config_of, trace_at, training_of
from hf_memsave.sizes import GIB, MIB, bytes_of
from hf_memsave.wtacrs import is_int

#: What CUDA takes for itself in each process, in no allocator; it depends on device and driver.
CONTEXT = 500 * MIB
#: What cuBLAS takes: by PyTorch's default 8.1 MiB for the thread of the forward, and for that of the backward.
WORKSPACES = 2 * (4096 * 2 + 16 * 8) * 1024


@dataclass(frozen=True, kw_only=True)
class Memory:
    """One step's memory on one device, in bytes.

    Attributes:
        peak: The most that PyTorch's allocator has given out at once.
        where: The moment of the step at which that is.
        parameters: With buffers.
        gradients: Of them, at the peak.
        states: Of the optimizer.
        activations: Whatever else is alive at the peak: what is kept, and transients.
        kept: Between forward and backward.
        by_kind: The same by kind of op.
        by_module: The same by module, "*" for the number of a block.
        per_layer: The same that each layer adds, by field of the configuration.
        timeline: The highest moment of each part of the step, in order.
    """

    peak: int
    where: str
    parameters: int
    gradients: int
    states: int
    activations: int
    kept: int
    by_kind: dict[str, int]
    by_module: dict[str, int]
    per_layer: dict[str, float]
    timeline: tuple[Point, ...]

    @property
    def needed(self) -> int:
        """What a GPU must have: the peak, and what CUDA and cuBLAS take."""
        return self.peak + WORKSPACES + CONTEXT


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What :func:`estimate` found; ``str()`` of it is a table.

    Attributes:
        model: Its type, and its depth by field of the configuration.
        depth: Field of the configuration -> number of layers.
        numbers: How many "parameters" there are, and how many are "trained".
        u: Bytes of one activation ``[batch, seq, hidden]``.
        stock: Without hf_memsave.
        patched: With it; None where that was not asked for.
        memory: The limit in bytes; None if none was given.
    """

    model: str
    depth: dict[str, int]
    numbers: dict[str, int]
    u: int
    stock: Memory
    patched: Memory | None
    memory: int | None = None

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
        for name in ("parameters", "gradients", "states", "activations"):
            rows.append((name, *(_gib(getattr(m, name)) for m in columns)))
        rows.append(("peak", *(_gib(m.peak) for m in columns)))
        rows.append(("needed, with CUDA's own", *(_gib(m.needed) for m in columns)))
        rows.append(("kept for backward", *(_gib(m.kept) for m in columns)))
        for field in self.depth:
            rows.append((f"u a layer ({field})", *(f"{m.per_layer[field] / self.u:.2f}" for m in columns)))
        layers = " + ".join(map(str, self.depth.values()))
        title = f"{self.model}, {layers} layers, {self.numbers['parameters'] / 1e6:,.1f} M parameters"
        lines = [f"{name:<30}" + "".join(f"{cell:>14}" for cell in cells) for name, *cells in rows]
        where = "; ".join(dict.fromkeys(f"the peak is {m.where}" for m in columns))
        fits = [] if self.memory is None else [f"{'Fits' if self.fits else 'Does not fit'} in {_gib(self.memory)}."]
        return "\n".join([title, *lines, where, *fits])


def estimate(
    model_or_config: str | PreTrainedConfig | nn.Module,
    *,
    batch_size: int,
    seq_len: int,
    memsave: MemSaveLike = True,
    memory: int | str | None = None,
    devices: int = 1,
    sharding: str = "ddp",
    layers: int | None = None,
    progress: Callable[[float], None] | None = None,
    **training: Any,
) -> Estimate:
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
            of :class:`~hf_memsave.measure.lora.Lora`.

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
    fields = depth_fields(config)
    depth = {field: layers or getattr(config, field) for field in fields}
    tell = progress or (lambda share: None)
    tell(0)
    stock, per_layer = trace_in_full(config, depth, setting, None)
    tell(0.3 if resolved else 1)
    memories = [_memory(stock, per_layer, sharding, devices)]
    if resolved is not None:
        patched, per_layer = trace_in_full(config, depth, setting, resolved)
        memories.append(_memory(patched, per_layer, sharding, devices))
        tell(1)
    return Estimate(
        model=config.model_type,
        depth=depth,
        numbers=stock.numbers,
        u=batch_size * seq_len * config.hidden_size * setting.u_itemsize,
        stock=memories[0],
        patched=memories[1] if resolved is not None else None,
        memory=limit,
    )


@away_from_gpus
def trace_in_full(
    config: PreTrainedConfig,
    depth: dict[str, int],
    training: Training,
    memsave: MemSaveConfig | None,
    keeps: bool = True,
    on_cpu: bool = False,
) -> tuple[Traced, dict[str, float]]:
    """A step at full depth, from steps of few layers as :func:`trace_at` runs them.

    Returns:
        The step, and field of the configuration -> the bytes that each layer keeps.
    """
    depths = depths_of(config, depth, training, memsave)
    first, *deeper = (trace_at(config, at, training, memsave, keeps, on_cpu) for at in depths.run)

    def of(name: str) -> Any:
        return extrapolated(getattr(first, name), [getattr(traced, name) for traced in deeper], depths.times)

    kept = [sum(traced.by_kind.values()) for traced in (first, *deeper)]
    per_layer = {field: (k - kept[0]) / n for (field, n), k in zip(depths.every.items(), kept[1:], strict=True)}
    trace = trace_at_full_depth(first.trace, [traced.trace for traced in deeper], depths.times)
    full = Traced(trace=trace, numbers=of("numbers"), by_kind=of("by_kind"), by_module=of("by_module"))
    return full, per_layer


def _memory(traced: Traced, per_layer: dict[str, float], sharding: str, devices: int) -> Memory:
    trace = sharded(traced.trace, sharding, devices)
    place, highest = max(trace.places.items(), key=lambda item: item[1].live)
    parts = trace.parameters + highest.gradients + trace.states
    return Memory(
        peak=highest.live,
        where=_described(place, highest.op),
        parameters=trace.parameters,
        gradients=highest.gradients,
        states=trace.states,
        activations=highest.live - parts,
        kept=sum(traced.by_kind.values()),
        by_kind=traced.by_kind,
        by_module=traced.by_module,
        per_layer=per_layer,
        timeline=timeline(trace),
    )


def _described(place: Place, op: str) -> str:
    op = op.removeprefix("aten.").partition(".")[0]
    where = f" {in_words(place)}" if place.stack else ""
    return f"in the {place.phase}{where}, in {op}"


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:,.2f} GiB"
