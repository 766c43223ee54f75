"""Estimate the GPU memory of a training step from a model's configuration alone: no weights, and no GPU.

A few layers run on a stand-in (:mod:`~hf_memsave.measure.fake_device`), where every byte is counted; the full depth
follows exactly (:mod:`~hf_memsave.measure.depth`).

Modelled: parameters, gradients, optimizer states, activations, transients of forward, loss, backward and optimizer,
autocast's copies, adapters, rounding to 512 bytes, the largest workspaces of attention. Stated as constants:
:data:`~hf_memsave.measure.figures.OWN`. Not modelled: fragmentation, communication buffers, kernels' other workspaces.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from hf_memsave.config.config import MemSaveConfig, MemSaveLike
from hf_memsave.config.sizes import both, bytes_of, counted, gib, html_table
from hf_memsave.config.wtacrs import is_int
from hf_memsave.errors import MeasureError
from hf_memsave.measure.depth import trace_in_full, with_depth
from hf_memsave.measure.fake_device import without_gpus
from hf_memsave.measure.figures import OWN, Trace
from hf_memsave.measure.inputs import inputs_of
from hf_memsave.measure.training import OPTIMIZERS, Training, config_of, training_of


@dataclass(frozen=True, kw_only=True, repr=False)
class Estimate:
    """The result of :func:`estimate`; ``str()`` of it is a table."""

    model: str  # the model type
    depth: dict[str, int]  # field of the configuration -> number of layers; empty for a model that is traced whole
    u: int | None  # bytes of one activation ``[batch, seq, hidden]``; None for inputs other than tokens
    stock: Trace  # the step without hf_memsave
    patched: Trace | None  # the step with it; None where that was not asked for
    optimizer: str  # a key of OPTIMIZERS
    memory: int | None = None  # the limit in bytes; None if none was given

    @property
    def step(self) -> Trace:
        """The patched step; stock's where only that was estimated."""
        return self.patched or self.stock

    @property
    def fits(self) -> bool | None:
        """Whether :attr:`step` needs no more than ``memory``; None without a limit."""
        return None if self.memory is None else self.step.needed <= self.memory

    def to_dict(self) -> dict[str, Any]:
        """Return all figures, in bytes, as plain data."""
        steps: dict[str, Any] = {name: trace.to_dict() for name, trace in self.columns.items()}
        told = {name: getattr(self.step, name) for name in ("numbers", "inputs", "has_loss")}
        sites = [(*site, count) for site, count in sorted(self.step.sites.items())]
        told |= {"cls": self.step.model, "sites": sites, "fits": self.fits}
        return copy.deepcopy(vars(self) | steps | told)

    @property
    def columns(self) -> dict[str, Trace]:
        """The traced steps by name: "stock", and "patched" if there is one."""
        return {"stock": self.stock} | ({"patched": self.patched} if self.patched else {})

    @property
    def _title(self) -> str:
        layers = [counted(" + ".join(map(str, self.depth.values())), "layer")] * bool(self.depth)
        return ", ".join([self.model, *layers, f"{self.stock.numbers['parameters'] / 1e6:,.1f} M parameters"])

    def _rows(self) -> list[list[str]]:
        shown = [*self.columns.values()]
        named = {name: words for name, words in _ROWS.items() if name != "away" or any(m.away for m in shown)}
        rows = [[words, *(gib(getattr(m, name)) for m in shown)] for name, words in named.items()]
        fields = shown[0].per_layer
        each = [[f"kept by each layer ({of})", *(gib(m.per_layer[of]["kept"]) for m in shown)] for of in fields]
        return [["", *self.columns], *rows, *each]

    def remarks(self) -> list[str]:
        """Say where the peaks are, what would lower one that patching cannot, and whether the step fits."""
        peaks: dict[str, list[str]] = {}
        for name, memory in self.columns.items():
            peaks.setdefault(memory.where, []).append(name)
        lines = [f"{' and '.join(names)}: the peak is {where}." for where, names in peaks.items()]
        last = self.step
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


#: Figure of a trace -> its name in a table.
_ROWS = {
    "parameters": "parameters", "trained": "gradients", "states": "optimizer's states", "kept": "kept for backward",
    "away": "  of which in main memory",
    "in_passes": "peak of forward and backward", "in_optimizer": "peak of the optimizer's step",
    "temporaries": "  of which are its temporaries", "peak": "peak of the step", "needed": "needed, with CUDA's own",
}  # fmt: skip
#: Optimizer -> what lowers the peak of its step, in words.
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
        batch_size: Sequences (or images, or audio clips) on each device.
        seq_len: Tokens in each sequence.
        batch: Tensors by name, instead of these two: their shapes and dtypes are read.
        memsave: As for :func:`hf_memsave.patch`; False for stock alone.
        memory: The memory of each device, in bytes or as "24GiB", to tell whether the step fits.
        devices: Number of devices that train together.
        sharding: "ddp", "zero1", "zero2" or "fsdp" (also for ZeRO-3).
        layers: Number of layers, instead of the configuration's own.
        **training: Fields of :class:`~hf_memsave.measure.training.Training`: dtype, autocast, optimizer, lora,
            quantized, checkpointing, accumulation, attention, padded, holds_output. A ``lora`` may be a dict of fields
            of :class:`~hf_memsave.config.lora.Lora`.

    Returns:
        Stock's step beside the patched one.

    Raises:
        MeasureError: The model or a field is not known, or the step cannot be run.
        PlanError: ``memory`` is no size.

    Example:
        >>> from hf_memsave import estimate
        >>> from transformers import LlamaConfig
        >>> small = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 8}
        >>> found = estimate(LlamaConfig(**small, vocab_size=256), batch_size=8, seq_len=512, memory="1GiB")
        >>> found.fits, found.patched.kept < 0.6 * found.stock.kept
        (True, True)
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
    tokens, dtype = traces[0].inputs.get("input_ids"), setting.autocast or setting.dtype  # that linears compute in
    steps = [trace.sharded(sharding, devices) for trace in traces]
    u = math.prod(tokens) * config.hidden_size * dtype.itemsize if tokens and depth else None
    return Estimate(
        model=config.model_type, depth=depth, u=u, stock=steps[0], patched=steps[-1] if resolved else None,
        optimizer=setting.optimizer, memory=limit,
    )  # fmt: skip


@without_gpus
def _traces(
    config: PreTrainedConfig, depth: dict[str, int], setting: Training, ways: tuple[MemSaveConfig | None, ...]
) -> list[Trace]:
    return [copy.deepcopy(trace_in_full(config, depth, setting, memsave)) for memsave in ways]  # which is remembered
