"""Count the bytes that one setting of a model needs for one batch, and time its step."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import timeit
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_memsave.config.config import MemSaveConfig, MemSaveLike
from hf_memsave.config.sizes import bytes_of, gib, html_table
from hf_memsave.count.kept import measure_kept
from hf_memsave.errors import MeasureError, PlanError
from hf_memsave.measure.inputs import loss_of
from hf_memsave.measure.largest import search
from hf_memsave.patching.patch import PatchReport, patch
from hf_memsave.patching.swap import is_patched

#: A function that runs the step it is given once or more, and returns the seconds of one.
Timer = Callable[[Callable[[], None]], float]


@dataclass(frozen=True)
class Trial:
    """One configuration that was tried."""

    name: str  # what was converted, in words
    batch_size: int  # sequences in the batch
    kept: int  # bytes kept between forward and backward
    needed: int  # those, and parameters, buffers, gradients and the optimizer's state
    fits: bool  # whether ``needed`` is within the limit
    seconds: float | None = None  # of one forward and backward; None where it was not timed


@dataclass(frozen=True, repr=False)
class Plan:
    """The result of :func:`fast` or :func:`smart`, which have applied it; ``str()`` of it is a table."""

    config: MemSaveConfig | None  # what the model is patched with now; None if it was left stock
    batch_size: int  # sequences in the batch that it is for
    memory: int  # the limit in bytes
    reason: str  # why, in one sentence
    trials: tuple[Trial, ...]  # all that were tried, in order
    report: PatchReport | None = None  # of the patched model; None if it was left stock

    def _rows(self) -> list[list[str]]:
        rows = [["converted", "batch", "kept", "needed", "seconds", ""]]
        for t in self.trials:
            seconds, fits = "" if t.seconds is None else f"{t.seconds:.4f}", "fits" if t.fits else "too much"
            rows.append([t.name, str(t.batch_size), gib(t.kept), gib(t.needed), seconds, fits])
        return rows

    def __repr__(self) -> str:
        return f"<Plan for a batch of {self.batch_size} in {gib(self.memory)}: {self.reason}>"

    def __str__(self) -> str:
        lines = ["{:<48} {:>6} {:>12} {:>12} {:>8} {}".format(*row).rstrip() for row in self._rows()]
        return "\n".join([*lines, self.reason])

    def _repr_html_(self) -> str:
        return html_table(f"Auto-Tempo in {gib(self.memory)}", self._rows(), [self.reason])


class _DeviceFullError(PlanError):
    """A batch that does not fit in the device's memory."""


def median_seconds(step: Callable[[], None]) -> float:
    """Return the median seconds of five steps, after one to warm up."""
    return statistics.median(timeit.repeat(step, number=1, repeat=6)[1:])


class Bench:
    """A bench that counts and times a model, patched or not by the caller, into ``trials``; it restores nothing."""

    def __init__(
        self, model: nn.Module, batch: Mapping[str, Any], config: MemSaveLike, memory: int | str | None,
        forward: Callable[..., Any] | None, optimizer_bytes: int, timer: Timer,
    ) -> None:  # fmt: skip
        if any(map(is_patched, model.modules())):
            reason = f"expected a stock {type(model).__name__}, got one that is patched already."
            raise PlanError(reason, "Call hf_memsave.unpatch(model) first, or load it without memsave=.")
        if (resolved := MemSaveConfig.resolve(config)) is None:
            raise PlanError(f"config: expected something to convert, got {config!r}. Use config=True.")
        self.model, self.batch, self.config, self.timer = model, batch, resolved, timer
        self.memory, self.trials = limit_of(memory, model), list[Trial]()
        self.call = model if forward is None else forward
        self.trained = [p for p in model.parameters() if p.requires_grad]
        if not self.trained:
            raise PlanError(f"{type(model).__name__}: expected parameters to train, got none. Unfreeze some.")
        self.fixed = sum(t.numel() * t.itemsize for t in (*model.parameters(), *model.buffers()))
        self.fixed += sum(p.numel() * (p.itemsize + optimizer_bytes) for p in self.trained)
        self.batch_size = _batch_size(batch)

    def plan(self, config: MemSaveConfig | None, batch_size: int, reason: str) -> Plan:
        """Patch the model with ``config``, if any, and return the plan."""
        report = None if config is None else patch(self.model, config)
        return Plan(config, batch_size, self.memory, reason, tuple(self.trials), report)

    def count(self, name: str, size: int) -> Trial:
        """Count the bytes that the model needs for a batch of this size, and add the trial."""
        with self._batch(size) as batch:
            kept = measure_kept(self.model, batch, self._loss).total
        needed = self.fixed + kept
        self.trials.append(trial := Trial(name, size, kept, needed, needed <= self.memory))
        return trial

    def seconds(self, trial: Trial) -> float:
        """Time one forward and backward on the batch of a trial, and record the seconds in it."""

        def step() -> None:
            # Not backward(): it would add to gradients that are not the model's, and run an optimizer in a hook.
            torch.autograd.grad(self._loss(**batch), self.trained, allow_unused=True)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()

        with self._batch(trial.batch_size) as batch:
            seconds = self.timer(step)
        self.trials[self.trials.index(trial)] = replace(trial, seconds=seconds)
        return seconds

    def largest(self, name: str, most: int) -> Trial:
        """Return the trial of the largest batch up to ``most`` that fits, or of 0 sequences if none does."""
        known = {0: Trial(name, 0, 0, self.fixed, True)}

        def needed(size: int) -> int:
            try:
                known[size] = self.count(name, size)
            except _DeviceFullError:
                return 2 * self.memory
            for (n, less), (m, more) in itertools.pairwise(sorted(known.items())):
                if more.needed <= less.needed:
                    got = f"{gib(more.needed)} and {gib(less.needed)}"
                    reason = f"expected a batch of {m} to need more than one of {n}, got {got}."
                    raise PlanError(reason, "Give tensors [batch, ...] that the loss depends on.")
            return known[size].needed

        return known[search(needed, self.memory, self.batch_size, most, {0: self.fixed})]

    def _loss(self, **inputs: Any) -> Tensor:
        return loss_of(self.call(**inputs), self.model, inputs)

    @contextlib.contextmanager
    def _batch(self, size: int) -> Iterator[Mapping[str, Any]]:
        """Give a batch of this size; raise an error inside as one that says what is lacking."""
        if not self.model.training:  # else parts of it may be in another mode on purpose
            self.model.train()
        try:
            yield self.batch if size == self.batch_size else resized(self.batch, size)
        except MeasureError as error:
            raise PlanError(str(error)) from error
        except (RuntimeError, MemoryError) as error:
            if "use_reentrant=True" in str(error):
                raise PlanError(
                    "a step is timed without touching gradients, which checkpointing with use_reentrant=True cannot "
                    "do. Have the model checkpoint with {'use_reentrant': False}, Transformers' default."
                ) from error
            is_full = isinstance(error, (torch.OutOfMemoryError, MemoryError))
            if not is_full and "DefaultCPUAllocator: " not in str(error):  # whose error has no type of its own
                raise
            reason = f"the device ran out of memory on {size} sequences, expected room for {gib(self.memory)}."
            remedy = "What backward computes and drops again is not counted: give a smaller limit, or a smaller batch."
            raise _DeviceFullError(reason, remedy) from error


def limit_of(memory: int | str | None, model: nn.Module) -> int:
    """Return ``memory`` in bytes; for None, nine tenths of what the model's one CUDA device has left for it."""
    if memory is not None:
        return bytes_of(memory)
    parameters = list(model.parameters())
    devices = sorted({p.device for p in parameters}, key=str)
    if [device.type for device in devices] != ["cuda"]:
        where = ", ".join(map(str, devices))
        reason = f"memory: expected how much there is, such as '16GiB', got None for a model on {where}."
        raise PlanError(reason, "Name it: only the free memory of one CUDA device is known.")
    free = torch.cuda.mem_get_info(devices[0])[0] + torch.cuda.memory_reserved(devices[0])
    own = [*parameters, *model.buffers(), *(p.grad for p in parameters if p.grad is not None)]
    free += sum(t.numel() * t.itemsize for t in own) - torch.cuda.memory_allocated(devices[0])
    return int(0.9 * free)  # the rest is for backward's temporaries and fragmentation


def resized(batch: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return the batch cut to ``size`` sequences, or repeated up to them."""
    index = torch.arange(size) % _batch_size(batch)
    return {k: v[index.to(v.device)] if isinstance(v, Tensor) and v.dim() else v for k, v in batch.items()}


def _batch_size(batch: Mapping[str, Any]) -> int:
    expected = "expected a mapping of tensors [batch, ...] of one batch size"
    if not isinstance(batch, Mapping):
        raise PlanError(f"the batch: {expected}, got {type(batch).__name__}. Give the model's keyword arguments.")
    sizes = {k: v.shape[0] for k, v in batch.items() if isinstance(v, Tensor) and v.dim()}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise PlanError(f"the batch: {expected}, got {sizes or list(batch)}. Expand or leave out other tensors.")
    return next(iter(sizes.values()))
