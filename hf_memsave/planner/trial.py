"""What one configuration needs for one batch: bytes, counted; and the seconds of a step."""

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

from hf_memsave.config.sizes import bytes_of, gib
from hf_memsave.count.kept import measure_kept
from hf_memsave.errors import MeasureError, PlanError
from hf_memsave.measure.inputs import loss_of
from hf_memsave.measure.largest import search

#: Runs the step it is given as often as it likes, and returns the seconds of one.
Timer = Callable[[Callable[[], None]], float]

_STEPS = 5
#: Of the memory that a CUDA device has left; the rest is for backward's temporaries and fragmentation.
_USABLE = 0.9


@dataclass(frozen=True)
class Trial:
    """One configuration that was tried."""

    name: str  # what was converted, in words
    batch_size: int  # sequences in the batch
    kept: int  # bytes kept between forward and backward
    needed: int  # those, and parameters, buffers, gradients and the optimizer's state
    fits: bool  # whether ``needed`` is within the limit
    seconds: float | None = None  # of one forward and backward; None where it was not timed


class _DeviceFullError(PlanError):
    """A batch that the device has no room for."""


def median_seconds(step: Callable[[], None]) -> float:
    """The median of a few steps, after one to warm up."""
    return statistics.median(timeit.repeat(step, number=1, repeat=1 + _STEPS)[1:])


class Bench:
    """Counts and times a model as it is patched at the moment, in ``trials``; it does not put anything back."""

    def __init__(
        self, model: nn.Module, batch: Mapping[str, Any], memory: int, forward: Callable[..., Any] | None,
        optimizer_bytes: int, timer: Timer,
    ) -> None:  # fmt: skip
        if not model.training:  # else parts of it may be in another mode on purpose
            model.train()
        self.model, self.batch, self.memory, self.timer = model, batch, memory, timer
        self.call = model if forward is None else forward
        self.trained = [p for p in model.parameters() if p.requires_grad]
        if not self.trained:
            raise PlanError(
                f"expected parameters of {type(model).__name__} that require a gradient, got none. Unfreeze some."
            )
        self.fixed = own_bytes(model) + sum(p.numel() * (p.itemsize + optimizer_bytes) for p in self.trained)
        self.batch_size = _batch_size(batch)
        self.trials: list[Trial] = []

    def count(self, name: str, batch_size: int | None = None) -> Trial:
        """Count what the model needs for the batch, or for one of another size."""
        size = batch_size or self.batch_size
        with self._batch(size) as batch:
            kept = measure_kept(self.model, batch, self._loss).total
        needed = self.fixed + kept
        self.trials.append(trial := Trial(name, size, kept, needed, needed <= self.memory))
        return trial

    def seconds(self, trial: Trial) -> float:
        """The seconds of one forward and backward on the batch of a trial, which are noted there."""

        def step() -> None:
            # Not backward(): it would add to gradients that are not the model's, and run an optimizer in a hook.
            torch.autograd.grad(self._loss(**batch), self.trained, allow_unused=True)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()

        with self._batch(trial.batch_size) as batch:
            seconds = self.timer(step)
        self.trials[self.trials.index(trial)] = replace(trial, seconds=seconds)
        return seconds

    def largest(self, name: str, most: int) -> Trial | None:
        """Count the largest batch that fits the model as it is; None if none does."""
        known: dict[int, Trial] = {}

        def points() -> list[tuple[int, int]]:
            return [(0, self.fixed), *sorted((n, trial.needed) for n, trial in known.items())]

        def predicted(size: int) -> float:
            (n, a), (m, b) = (points() if known else [(0, 0), (1, self.memory + 1)])[-2:]
            return a + (size - n) * (b - a) / (m - n)

        def needed(size: int) -> int:
            try:
                known[size] = self.count(name, size)
            except _DeviceFullError:
                return 2 * self.memory
            for (n, a), (m, b) in itertools.pairwise(points()):
                if b <= a:
                    raise PlanError(
                        f"expected a batch of {m} to need more than one of {n}, got {gib(b)} and {gib(a)}. Give "
                        "tensors [batch, ...] that the loss depends on."
                    )
            return known[size].needed

        return known.get(search(needed, self.memory, self.batch_size, most, predicted))

    @contextlib.contextmanager
    def _batch(self, batch_size: int) -> Iterator[Mapping[str, Any]]:
        """A batch of this size, and what lacks inside of it, told."""
        try:
            yield self.batch if batch_size == self.batch_size else resized(self.batch, batch_size)
        except (RuntimeError, MemoryError) as error:
            if "use_reentrant=True" in str(error):
                raise PlanError(
                    "a step is timed without touching gradients, which checkpointing with use_reentrant=True cannot "
                    "do. Have the model checkpoint with {'use_reentrant': False}, Transformers' default."
                ) from error
            is_of_cpu = "DefaultCPUAllocator: " in str(error)  # which has no type of its own
            if not is_of_cpu and not isinstance(error, (torch.OutOfMemoryError, MemoryError)):
                raise
            raise _DeviceFullError(
                f"the device ran out of memory on {batch_size} sequences, expected room for {gib(self.memory)}. What "
                "backward computes and drops again is not counted: give a smaller limit, or a smaller batch."
            ) from error

    def _loss(self, **inputs: Any) -> Tensor:
        output = self.call(**inputs)
        try:
            return loss_of(output, self.model, inputs)
        except MeasureError as error:
            raise PlanError(str(error)) from error


def own_bytes(model: nn.Module) -> int:
    """Bytes of the parameters and buffers."""
    return sum(t.numel() * t.itemsize for t in (*model.parameters(), *model.buffers()))


def limit_of(memory: int | str | None, model: nn.Module) -> int:
    """The limit in bytes; None for nine tenths of what the model's CUDA device has for it, if it is on one."""
    if memory is not None:
        return bytes_of(memory)
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1 or (device := next(iter(devices))).type != "cuda":
        where = ", ".join(sorted(map(str, devices)))
        raise PlanError(
            f"memory: expected how much there is, such as '16GiB', got None for a model on {where}. Only for one CUDA "
            "device it can be asked: name it."
        )
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    gradients = sum(p.grad.numel() * p.grad.itemsize for p in model.parameters() if p.grad is not None)
    return int(_USABLE * (free - torch.cuda.memory_allocated(device) + own_bytes(model) + gradients))


def resized(batch: Mapping[str, Any], size: int) -> dict[str, Any]:
    """The first ``size`` sequences of the batch, begun again where it ends."""
    index = torch.arange(size) % _batch_size(batch)
    return {k: v[index.to(v.device)] if isinstance(v, Tensor) and v.dim() else v for k, v in batch.items()}


def _batch_size(batch: Mapping[str, Any]) -> int:
    expected = "expected a mapping of tensors [batch, ...] of one batch size"
    if not isinstance(batch, Mapping):
        raise PlanError(f"the batch: {expected}, got {type(batch).__name__}. Give the model's keyword arguments.")
    sizes = {k: v.shape[0] for k, v in batch.items() if isinstance(v, Tensor) and v.dim()}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise PlanError(f"the batch: {expected}, got {sizes or list(batch)}. Expand or leave out what has no batch.")
    return next(iter(sizes.values()))
