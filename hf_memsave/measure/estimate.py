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

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from hf_memsave.config.config import MemSaveConfig, MemSaveLike
from hf_memsave.config.sizes import MIB, both, bytes_of, counted, gib, html_table
from hf_memsave.config.wtacrs import is_int
from hf_memsave.errors import MeasureError
from hf_memsave.measure.depth import trace_in_full, with_depth
from hf_memsave.measure.fake_device import without_gpus
from hf_memsave.measure.inputs import inputs_of
from hf_memsave.measure.trace import Moment, Place, Point, Trace, timeline
from hf_memsave.measure.training import OPTIMIZERS, Training, config_of, training_of

#: What CUDA takes for itself in each process, in no allocator; it depends on device and driver.
CONTEXT = 500 * MIB
#: What cuBLAS takes for the thread of the forward, and for that of the backward: on Hopper 32 MiB each, before it 8.1.
WORKSPACES = 2 * 32 * MIB
#: What there is in no trace.
OWN = WORKSPACES + CONTEXT
#: Name -> which of parameters, gradients and states are divided by the number of devices. FSDP (and ZeRO-3) gathers
#: the parameters of the block that runs, and of the next one beside it, and has one block's gradients whole until they
#: are reduced. What lies outside of blocks is gathered as one more unit.
SHARDINGS = {
    "ddp": (False, False, False),
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    "fsdp": (True, True, True),
}


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
    away: int  # of that, in main memory
    by_kind: dict[str, int]  # kept bytes by kind of op
    by_module: dict[str, int]  # kept bytes by module, "*" for the number of a block
    depths: tuple[dict[str, int], ...]  # numbers of layers that were traced, by field of the configuration
    per_layer: dict[str, float]  # kept bytes that each layer adds, by field of the configuration; or none
    timeline: tuple[Point, ...]  # the highest moment of each part of the step, in order
    trained: int  # gradients of all that is trained, as after backward
    in_passes: int  # the most that is alive in forward and backward
    in_optimizer: int  # the most that is alive in the optimizer's step
    temporaries: int  # of the optimizer's step, at its highest moment

    @property
    def fixed(self) -> int:
        """What a step takes at any size of the batch: parameters, gradients and states."""
        return self.parameters + self.trained + self.states

    @property
    def needed(self) -> int:
        """What a GPU must have: the peak, and what CUDA and cuBLAS take."""
        return self.peak + OWN


@dataclass(frozen=True, kw_only=True, repr=False)
class Estimate:
    """What :func:`estimate` found; ``str()`` of it is a table."""

    model: str  # its type
    cls: str  # its class
    depth: dict[str, int]  # field of the configuration -> number of layers; of a model that is traced whole, none
    numbers: dict[str, int]  # how many "parameters" there are, and how many are "trained"
    inputs: dict[str, tuple[int, ...]]  # name -> shape
    has_loss: bool  # whether the model gives one; else the sum of its whole output was taken, which was held
    sites: tuple[tuple[Any, ...], ...]  # (status, op, class, reason, how many) of what is patched, or why it is not
    u: int | None  # bytes of one activation ``[batch, seq, hidden]``; of other inputs than tokens, None
    stock: Memory  # without hf_memsave
    patched: Memory | None  # with it; None where that was not asked for
    optimizer: str  # as in the training
    memory: int | None = None  # the limit in bytes; None if none was given

    @property
    def fits(self) -> bool | None:
        """Whether the step, patched where that was asked for, needs no more than ``memory``."""
        return None if self.memory is None else (self.patched or self.stock).needed <= self.memory

    def to_dict(self) -> dict[str, Any]:
        """Plain data, in bytes."""
        needed = {name: asdict(m) | {"needed": m.needed} for name, m in self.columns.items()}
        return asdict(self) | needed | {"fits": self.fits}

    @property
    def columns(self) -> dict[str, Memory]:
        """Stock's step, and the patched one if there is one, by name."""
        return {"stock": self.stock} | ({"patched": self.patched} if self.patched else {})

    @property
    def _title(self) -> str:
        layers = [counted(" + ".join(map(str, self.depth.values())), "layer")] * bool(self.depth)
        return ", ".join([self.model, *layers, f"{self.numbers['parameters'] / 1e6:,.1f} M parameters"])

    def _rows(self) -> list[list[str]]:
        shown = [*self.columns.values()]
        named = {name: words for name, words in _ROWS.items() if name != "away" or any(m.away for m in shown)}
        rows = [[words, *(gib(getattr(m, name)) for m in shown)] for name, words in named.items()]
        fields = shown[0].per_layer
        each = [[f"kept by each layer ({field})", *(gib(m.per_layer[field]) for m in shown)] for field in fields]
        return [["", *self.columns], *rows, *each]

    def remarks(self) -> list[str]:
        """Where the peaks are, what would lower one that patching cannot, and whether the step fits."""
        peaks: dict[str, list[str]] = {}
        for name, memory in self.columns.items():
            peaks.setdefault(memory.where, []).append(name)
        lines = [f"{' and '.join(names)}: the peak is {where}." for where, names in peaks.items()]
        last = self.patched or self.stock
        if last.in_optimizer == last.peak and last.temporaries > last.peak // 100:
            line = f"The optimizer's step takes {gib(last.temporaries)} of temporaries, which patching does not change."
            if last.in_passes < self.stock.in_passes:
                before, after = self.stock.in_passes, last.in_passes
                line += f" In forward and backward the peak falls from {gib(before)} to {gib(after)}."
            lines.append(f"{line} Lower it with {_LOWER[self.optimizer]}.")
        if self.memory is not None:
            left = self.memory - last.needed
            told = f"Fits in {both(self.memory)}: {gib(left)} stay free."
            if left < 0:
                parts = f"parameters {gib(last.parameters)}, gradients {gib(last.trained)}, states {gib(last.states)}"
                told = f"Does not fit in {both(self.memory)}: {gib(-left)} too much. Fixed at any batch: "
                told += f"{gib(last.fixed)} ({parts}). Beside it CUDA's own: {gib(OWN)}."
            lines.append(told)
        return lines

    def __repr__(self) -> str:
        needed = ", ".join(f"{name} {gib(memory.needed)}" for name, memory in self.columns.items())
        fits = "" if self.fits is None else f", {'fits' if self.fits else 'does not fit'} in {gib(self.memory or 0)}"
        return f"<Estimate of {self._title}: {needed}{fits}>"

    def __str__(self) -> str:
        lines = [f"{name:<38}" + "".join(f"{cell:>14}" for cell in cells) for name, *cells in self._rows()]
        return "\n".join([self._title, *lines, *self.remarks()])

    def _repr_html_(self) -> str:
        return html_table(self._title, self._rows(), self.remarks())


#: Figures of a step -> what a table calls them.
_ROWS = {
    "parameters": "parameters", "trained": "gradients", "states": "optimizer's states", "kept": "kept for backward",
    "away": "  of which in main memory",
    "in_passes": "peak of forward and backward", "in_optimizer": "peak of the optimizer's step",
    "temporaries": "  of which are its temporaries", "peak": "peak of the step", "needed": "needed, with CUDA's own",
}  # fmt: skip
#: Optimizer -> what takes fewer temporaries, or fewer bytes beside them.
_LOWER = dict.fromkeys(OPTIMIZERS, "LoRA, or by sharding") | {
    "adamw": "fused AdamW (Trainer: optim='adamw_torch_fused') or foreach=False, or with 8-bit or paged AdamW",
    "adamw_fused": "8-bit or paged AdamW",
    "sgd": "fused=True or foreach=False",
    "sgd_momentum": "fused=True or foreach=False",
}


def estimate(
    model_or_config: str | PreTrainedConfig | nn.Module, *, batch_size: int | None = None, seq_len: int | None = None,
    batch: Mapping[str, Any] | None = None, memsave: MemSaveLike = True, memory: int | str | None = None,
    devices: int = 1, sharding: str = "ddp", layers: int | None = None, **training: Any,
) -> Estimate:  # fmt: skip
    """Estimate a training step's peak memory on a CUDA device, without one.

    Args:
        model_or_config: A name on the hub, a folder, a model type, a configuration, or a model of Transformers (of
            which the configuration is read, and the dtype of its weights).
        batch_size: Sequences, on each device; or images, or pieces of sound.
        seq_len: Tokens in each.
        batch: Tensors by name, instead of these two: shapes and dtypes are read.
        memsave: As for :func:`hf_memsave.patch`; False for stock alone.
        memory: What there is, in bytes or as "24GiB".
        devices: Over how many to shard.
        sharding: "ddp", "zero1", "zero2" or "fsdp" (which is ZeRO-3 too).
        layers: The depth, instead of the configuration's own.
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
    if batch is not None:
        batch_size, seq_len, training["inputs"] = 1, 1, inputs_of(batch)
    setting = training_of(batch_size=batch_size, seq_len=seq_len, **training)
    resolved = MemSaveConfig.resolve(memsave)
    config, depth = with_depth(config, layers)
    traces = _traces(config, depth, setting, tuple(dict.fromkeys((None, resolved))))
    memories = [_memory(one, sharding, devices, min(setting.accumulation, 2)) for one in traces]
    last, tokens = traces[-1], traces[0].inputs.get("input_ids")
    return Estimate(
        model=config.model_type,
        cls=last.model,
        depth=depth,
        numbers=traces[0].numbers,
        inputs=last.inputs,
        has_loss=last.has_loss,
        sites=tuple((*site, count) for site, count in sorted(last.sites.items())),
        u=math.prod(tokens) * config.hidden_size * setting.u_dtype.itemsize if tokens and depth else None,
        stock=memories[0],
        patched=memories[-1] if resolved else None,
        optimizer=setting.optimizer,
        memory=limit,
    )


@without_gpus
def _traces(
    config: PreTrainedConfig, depth: dict[str, int], setting: Training, ways: tuple[MemSaveConfig | None, ...]
) -> list[Trace]:
    return [trace_in_full(config, depth, setting, memsave) for memsave in ways]


def _memory(trace: Trace, sharding: str, devices: int, batches: int) -> Memory:
    trace = sharded(trace, sharding, devices)
    place, highest = max(trace.places.items(), key=lambda item: item[1].live)
    op = highest.op.removeprefix("aten.").partition(".")[0]
    part = "'s step" if place.phase == "optimizer" else f" {place.where}" if place.stack else ""
    held = trace.parameters + trace.states
    step = trace.places.get(Place("optimizer"), Moment(held + trace.trained, trace.trained, ""))
    return Memory(
        peak=highest.live,
        where=f"in the {place.phase}{part}, in {op}",
        parameters=trace.parameters,
        gradients=highest.gradients,
        states=trace.states,
        activations=highest.live - held - highest.gradients,
        kept=trace.kept,
        away=trace.away // batches,
        by_kind=dict(trace.by_kind),
        by_module=dict(trace.by_module),
        depths=trace.depths,
        per_layer={field: added["kept"] for field, added in trace.per_layer.items()},
        timeline=timeline(trace),
        trained=trace.trained,
        in_passes=max(moment.live for place, moment in trace.places.items() if place.phase != "optimizer"),
        in_optimizer=step.live,
        temporaries=max(0, step.live - held - step.gradients),
    )


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
