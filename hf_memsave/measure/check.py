"""Compare an estimate with a real step on this machine's GPU: random weights, PyTorch's own count of its memory."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel
from transformers import PreTrainedConfig

from hf_memsave.config.config import MemSaveConfig
from hf_memsave.config.sizes import gib
from hf_memsave.count.kept import measure_kept
from hf_memsave.count.peak import rounded
from hf_memsave.errors import MeasureError, MemSaveError
from hf_memsave.measure.estimate import Estimate
from hf_memsave.measure.kernels import BACKENDS
from hf_memsave.measure.models import at_depth
from hf_memsave.measure.trace import UNIT, make_states, run_passes
from hf_memsave.measure.training import Training, prepared

#: The largest difference allowed between prediction and measurement: of kept bytes, and of the peak.
SLACK = {"kept": 0.03, "peak": 0.07}


@dataclass(frozen=True, kw_only=True)
class Check:
    """Predicted and measured bytes "kept" for backward and at the "peak", without cuBLAS's workspaces."""

    predicted: dict[str, int]
    measured: dict[str, int]

    def difference(self, name: str) -> float:
        """Return the relative difference of the predicted bytes from the measured ones."""
        return self.predicted[name] / max(1, self.measured[name]) - 1

    @property
    def agrees(self) -> bool:
        """Whether both differences are within :data:`SLACK`."""
        return all(abs(self.difference(name)) <= slack for name, slack in SLACK.items())


def check(config: PreTrainedConfig, result: Estimate, training: Training, memsave: MemSaveConfig) -> dict[str, Check]:
    """Run the estimated step, "stock" and "patched", where it fits the GPU, and compare; MeasureError if none does."""
    free, found, config = torch.cuda.mem_get_info()[0], {}, at_depth(config, result.depth)
    for name, estimated in result.columns.items():
        if estimated.peak <= free:
            predicted = {"kept": estimated.kept, "peak": estimated.peak}
            measured = _on_cuda(config, training, None if name == "stock" else memsave)
            found[name] = Check(predicted=predicted, measured=measured)
    if not found:
        least = min(estimated.peak for estimated in result.columns.values())
        reason = f"the step needs {gib(least)}, and {gib(free)} are free on this machine's GPU."
        raise MeasureError(reason, "To check it there, lower --batch-size, --seq-len or --layers.")
    return found


def _on_cuda(config: PreTrainedConfig, training: Training, memsave: MemSaveConfig | None) -> dict[str, int]:
    """Run a real step whose optimizer already has its states, and return its bytes "kept" and at the "peak"."""
    gc.collect()  # a step before this one may hang in cycles
    torch.nn.Linear(8, 8, device="cuda")(torch.ones(8, 8, device="cuda")).sum().backward()  # has cuBLAS take its own
    before = torch.cuda.memory_allocated()
    held: list[Any] | None = [] if training.holds_output else None
    names = (training.attention, "flash", "efficient", "math")  # the one that was asked for first, as in the estimate
    kernels = sdpa_kernel([BACKENDS[name] for name in dict.fromkeys(names) if name != "eager"], set_priority=True)
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
            kept = measure_kept(model, batch, forward).storages  # made by no op: states of generators, in main memory
            return {"kept": sum(rounded(one.nbytes, UNIT) for one in kept if one.op != "unseen"), "peak": peak}
    except MemSaveError:
        raise
    except RuntimeError as error:
        raise MeasureError(
            f"the step cannot be run on this machine's cuda: {type(error).__name__}: {error}. If memory is short, "
            "lower --batch-size, --seq-len or --layers; or try another --attention or --dtype."
        ) from error
