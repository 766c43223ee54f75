"""The estimate held against a real step on this machine, with random weights: on CUDA its allocator's own peak.

Without CUDA, on the CPU: the bytes that few layers predict for the full depth against those counted in a step at that
depth. What CUDA would keep is then not checked, as the CPU's kernels are others.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch.nn.attention import sdpa_kernel
from transformers import PreTrainedConfig

from hf_memsave.config.config import MemSaveConfig
from hf_memsave.config.sizes import GIB
from hf_memsave.errors import MeasureError
from hf_memsave.measure.depth import trace_in_full
from hf_memsave.measure.estimate import WORKSPACES, Estimate, Memory
from hf_memsave.measure.inputs import forward_of, make_batch
from hf_memsave.measure.kernels import BACKENDS
from hf_memsave.measure.layers import at_depth
from hf_memsave.measure.models import choose_head
from hf_memsave.measure.peak import count_peak, rounded
from hf_memsave.measure.trace import UNIT, make_states, nbytes_of, run_passes
from hf_memsave.measure.training import OPTIMIZERS, Training, build
from hf_memsave.patching.patch import patch
from hf_memsave.tape import measure_kept

#: How far what was measured may be from what was predicted, by type of device: kept bytes, and the peak.
SLACK = {"cpu": {"kept": 0.01, "peak": 0.03}, "cuda": {"kept": 0.03, "peak": 0.07}}


@dataclass(frozen=True, kw_only=True)
class Check:
    """Bytes "kept" and at the "peak", predicted and measured; on CUDA with cuBLAS's work spaces."""

    device: str
    predicted: dict[str, int]
    measured: dict[str, int]

    def difference(self, name: str) -> float:
        """Of what was predicted from what was measured, as a share of the latter."""
        return self.predicted[name] / max(1, self.measured[name]) - 1

    @property
    def agrees(self) -> bool:
        """Whether all is within :data:`SLACK`."""
        return all(abs(self.difference(name)) <= slack for name, slack in SLACK[self.device].items())


def check(
    config: PreTrainedConfig, result: Estimate, training: Training, memsave: MemSaveConfig | None,
    tell: Callable[[float], None] = lambda share: None,
) -> dict[str, Check]:  # fmt: skip
    """Run the step that was estimated, on CUDA if it is there, and compare.

    Returns:
        "stock" and "patched" -> what was found, without those that are too large for this machine.

    Raises:
        MeasureError: All of them are, or they cannot be run on it.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings: list[tuple[str, MemSaveConfig | None, Memory]] = [("stock", None, result.stock)]
    if memsave is not None and result.patched is not None:
        settings.append(("patched", memsave, result.patched))
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    _refuse_too_large(min(estimated.peak for _, _, estimated in settings), free, device)
    found = {}
    for i, (name, chosen, estimated) in enumerate(settings):
        if estimated.peak > free:
            continue
        if device == "cuda":
            predicted = {"kept": estimated.kept, "peak": estimated.peak + WORKSPACES}
        else:
            traced, _ = trace_in_full(config, result.depth, training, chosen, on_cpu=True)
            predicted = {"kept": sum(traced.by_kind.values()), "peak": traced.peak}
            _refuse_too_large(predicted["peak"], free, device)
        tell((i + 0.5) / len(settings))
        measured = _measured(at_depth(config, result.depth), training, chosen, device)
        found[name] = Check(device=device, predicted=predicted, measured=measured)
        tell((i + 1) / len(settings))
    return found


def _refuse_too_large(peak: int, free: int, device: str) -> None:
    if peak > free:
        raise MeasureError(
            f"the step needs {peak / GIB:,.1f} GiB, and {free / GIB:,.1f} GiB are free for this machine's {device}. "
            "To check it there, lower batch_size, seq_len or the number of layers."
        )


def _measured(
    config: PreTrainedConfig, training: Training, memsave: MemSaveConfig | None, device: str
) -> dict[str, int]:
    """Bytes "kept", and the "peak", of a real step in which the optimizer has its states."""
    gc.collect()  # a step before this one may hang in cycles
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    batch: dict[str, Any] = make_batch(choose_head(config), config, training.batch_size, training.seq_len)
    if training.padded:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch = {name: value.to(device) for name, value in batch.items()}
    with torch.random.fork_rng(range(torch.cuda.device_count())), torch.device("cpu" if training.quantized else device):
        torch.manual_seed(0)
        model = build(config, training).to(device)  # in 4 bits already: in 16 it may not fit there
    if memsave is not None:
        patch(model, memsave)
    forward = forward_of(model, training.autocast)
    optimizer = OPTIMIZERS[training.optimizer](p for p in model.parameters() if p.requires_grad)
    held: list[Any] = []

    def step() -> None:
        for _ in range(training.accumulation):
            run_passes(model, batch, forward, held if training.holds_output else None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    try:
        with _kernels(training, device):
            # The step is the first with the model, as what is predicted: tapes learn in three forwards what they need
            # not record, and later steps may hold less for a while.
            make_states(optimizer)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                step()
                peak = torch.cuda.max_memory_allocated() - before
            else:
                states = [dict(state) for state in optimizer.state.values()]
                fixed = nbytes_of([*model.parameters(), *model.buffers(), states, batch], "cpu")
                peak = fixed + count_peak(step, UNIT).peak
            kept = sum(rounded(storage.nbytes, UNIT) for storage in measure_kept(model, batch, forward).storages)
            return {"kept": kept, "peak": peak}
    except RuntimeError as error:
        raise MeasureError(
            f"the step cannot be run on this machine's {device}: {type(error).__name__}: {error}. Lower batch_size, "
            "seq_len or the number of layers if it is memory that lacks; or try another attention or dtype."
        ) from error


def _kernels(training: Training, device: str) -> contextlib.AbstractContextManager[Any]:
    """The attention kernel that was asked for comes first, as in the estimate."""
    if device != "cuda" or training.attention == "eager":
        return contextlib.nullcontext()
    names = dict.fromkeys((training.attention, "flash", "efficient", "math"))
    kernels: contextlib.AbstractContextManager[Any] = sdpa_kernel([BACKENDS[n] for n in names], set_priority=True)
    return kernels
