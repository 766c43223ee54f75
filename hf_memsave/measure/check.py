"""The estimate held against a real step on this machine, with random weights: on CUDA its allocator's own peak.

Without CUDA, on the CPU: what few layers predict for the full depth against a step counted at that depth. What CUDA
would keep is then not checked, as the CPU's kernels are others.
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
from hf_memsave.count.kept import measure_kept
from hf_memsave.count.peak import rounded
from hf_memsave.errors import MeasureError, MemSaveError
from hf_memsave.measure.depth import trace_few
from hf_memsave.measure.estimate import WORKSPACES, Estimate, Memory
from hf_memsave.measure.kernels import BACKENDS
from hf_memsave.measure.models import at_depth
from hf_memsave.measure.trace import UNIT, make_states, run_passes
from hf_memsave.measure.training import Training, prepared, trace_at

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
    """Run the step that was estimated, "stock" and "patched", and compare; MeasureError if neither fits the machine."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    settings: dict[str, tuple[MemSaveConfig | None, Memory]] = {"stock": (None, result.stock)}
    if memsave is not None and result.patched is not None:
        settings["patched"] = memsave, result.patched
    _refuse_too_large(min(estimated.peak for _, estimated in settings.values()), free, device)
    found = {}
    for i, (name, (chosen, estimated)) in enumerate(settings.items()):
        if estimated.peak > free:
            continue
        if device == "cuda":
            predicted = {"kept": estimated.kept, "peak": estimated.peak + WORKSPACES}
            measured = _on_cuda(at_depth(config, result.depth), training, chosen)
        else:
            told, _ = trace_few(config, result.depth, training, chosen, on_cpu=True)
            _refuse_too_large(told.peak, free, device)
            tell((i + 0.5) / len(settings))
            true = trace_at(config, result.depth, training, chosen, on_cpu=True)
            predicted, measured = ({"kept": trace.kept, "peak": trace.peak} for trace in (told, true))
        found[name] = Check(device=device, predicted=predicted, measured=measured)
        tell((i + 1) / len(settings))
    return found


def _refuse_too_large(peak: int, free: int, device: str) -> None:
    if peak > free:
        raise MeasureError(
            f"the step needs {peak / GIB:,.1f} GiB, and {free / GIB:,.1f} GiB are free for this machine's {device}.",
            "To check it there, lower batch_size, seq_len or the number of layers.",
            option="To check it there, lower --batch-size, --seq-len or --layers.",
        )


def _on_cuda(config: PreTrainedConfig, training: Training, memsave: MemSaveConfig | None) -> dict[str, int]:
    """Bytes "kept", and the "peak", of a real step in which the optimizer has its states."""
    gc.collect()  # a step before this one may hang in cycles
    before = torch.cuda.memory_allocated()
    held: list[Any] | None = [] if training.holds_output else None
    kernels: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if training.attention != "eager":  # the kernel that was asked for comes first, as in the estimate
        names = dict.fromkeys((training.attention, "flash", "efficient", "math"))
        kernels = sdpa_kernel([BACKENDS[name] for name in names], set_priority=True)
    try:
        with kernels, prepared(config, training, memsave, "cuda") as (model, batch, forward, optimizer):
            make_states(optimizer)
            torch.cuda.reset_peak_memory_stats()
            # The first step, as predicted: tapes learn in three what they need not record, and may hold less later.
            for _ in range(training.accumulation):
                run_passes(model, batch, forward, held)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            peak = torch.cuda.max_memory_allocated() - before
            storages = measure_kept(model, batch, forward).storages
            return {"kept": sum(rounded(storage.nbytes, UNIT) for storage in storages), "peak": peak}
    except MemSaveError:
        raise
    except RuntimeError as error:
        raise MeasureError(
            f"the step cannot be run on this machine's cuda: {type(error).__name__}: {error}.",
            "Lower batch_size, seq_len or the number of layers if memory lacks; or try another attention or dtype.",
            option="Lower --batch-size, --seq-len or --layers if memory lacks; or try another --attention or --dtype.",
        ) from error
