"""Compare one training step of a model, stock and patched, to the bit; and make kernels give equal bits each time."""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import set_seed

from hf_memsave.config.config import MemSaveLike
from hf_memsave.count.kept import Kept, measure_kept
from hf_memsave.errors import MeasureError
from hf_memsave.logs import only_measuring
from hf_memsave.measure.inputs import cannot_run, device_of, forward_of, loss_of
from hf_memsave.patching.patch import patch, unpatch
from hf_memsave.patching.swap import set_class

#: On CUDA, where kernels add in no fixed order: the allowed multiple of the distance between stock's two runs.
DISTANCES = 2
#: The largest distance between stock's two runs for a comparison to be meaningful, with 32-bit and 16-bit numbers.
TOLERANCE, HALF_TOLERANCE = 1e-3, 2e-2
#: The distance allowed with 32-bit numbers where parts of a sum are added in another order.
ORDER_TOLERANCE = 2.0**-16
#: A variable that cuBLAS reads once in a process, and the values under which its sums have a fixed order.
_VARIABLE, _VALUES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")


class StockStepError(MeasureError):
    """A stock step that fails."""


class PatchedStepError(MeasureError):
    """A patched step that fails where the stock one works."""


@dataclass(frozen=True)
class Difference:
    """The loss or one parameter's gradient: whether its bits equal stock's, and the relative L2 distance to stock's."""

    name: str
    equal: bool
    relative: float  # to stock's norm, or a thousandth of the largest norm if more: some gradients are rounding alone

    def __str__(self) -> str:
        return "equal to the bit" if self.equal else f"{self.relative:.1e}"


@dataclass(frozen=True, kw_only=True)
class StepComparison:
    """The result of :func:`compare_step`."""

    losses: tuple[float, float]  # stock's and the patched model's
    loss: Difference
    gradients: tuple[Difference, ...]
    repeat: float  # the largest distance between stock's two runs; zero on CPU
    tolerance: float  # the distance allowed: DISTANCES times ``repeat``; where that is zero, bits must be equal
    reordered: str = ""  # what adds in another order, which is allowed as well
    stock: Kept
    patched: Kept

    @property
    def differing(self) -> tuple[Difference, ...]:
        """The loss and gradients that are further from stock's than allowed, the worst first."""
        found = [d for d in (self.loss, *self.gradients) if not d.equal and d.relative >= self.tolerance]
        return tuple(sorted(found, key=lambda d: -d.relative))


def compare_step(
    model: nn.Module, batch: Mapping[str, Any], config: MemSaveLike = True, *, autocast: torch.dtype | None = None,
    seed: int = 0,
) -> StepComparison:  # fmt: skip
    """Return losses, gradients and kept bytes of a step from one seed, stock (twice, as it may not repeat) and patched.

    Bits must be equal on CPU, under :func:`deterministic_kernels`, and wherever stock repeats itself; elsewhere on CUDA
    :data:`DISTANCES` times the distance of stock's two runs is allowed. Where modules run in rows, or the loss in parts
    and its step with ``loss="stock"`` has these bits, :data:`ORDER_TOLERANCE` is allowed, or :data:`HALF_TOLERANCE`
    with 16-bit numbers. The model, which returns a loss or a mapping with one, runs in its current mode and is restored
    afterwards, as are the process's default random generators: what another thread draws meanwhile is drawn again.

    Raises:
        StockStepError: The stock step fails.
        MeasureError: It has no loss or no gradient, or does not repeat itself (on CUDA: by more than rounding).
        PatchedStepError: The patched step fails.
        PatchError: The model cannot be patched.
    """
    device, forward = device_of(model), forward_of(model, autocast)
    with left_as_it_was(model) as start_over:

        def run() -> dict[str, Tensor]:
            """Run forward and backward from the seed; return the loss, and every gradient by its parameter's name."""
            start_over()
            set_seed(seed)
            loss = loss_of(forward(**batch), model, batch)
            loss.backward()
            gradients = {n: p.grad.to_dense() for n, p in model.named_parameters() if p.grad is not None}
            model.zero_grad(set_to_none=True)
            return {"loss": loss.detach(), **gradients}

        try:
            stock, again = run(), run()
        except MeasureError:
            raise
        except Exception as error:
            raise StockStepError(cannot_run(model, batch, error)) from error
        repeat = max(_differences(stock, again), key=lambda d: (not d.equal, d.relative))
        half = autocast is not None or any(g.dtype != torch.float32 for g in stock.values())
        asks_bits = device == "cpu" or torch.are_deterministic_algorithms_enabled()
        most = 0.0 if asks_bits else HALF_TOLERANCE if half else TOLERANCE
        if not repeat.equal and repeat.relative >= most:
            raise MeasureError(
                f"stock does not repeat itself: run twice from one seed, {repeat.name} differs by {repeat}. Expected "
                f"{f'less than {most:g}' if most else 'equal bits'}. Take state and random numbers out of the model's "
                "own forward, or, if a kernel adds in no fixed order, "
                f"{'set OMP_NUM_THREADS=1' if device == 'cpu' else 'use deterministic kernels'}."
            )
        del again  # gradients are as large as the model
        stock_kept, allowed = measure_kept(model, batch, forward), DISTANCES * repeat.relative
        report = patch(model, config)
        reordered = "modules that run in rows add gradients of weights" if report.config.checkpoint == "tiles" else ""
        try:
            patched = run()
            patched_kept = measure_kept(model, batch, forward)
            if report.step.is_loss_chunked and not reordered and not all(d.equal for d in _differences(stock, patched)):
                patch(model, replace(report.config, loss="stock"), replace=True)
                if all(d.equal or d.relative < allowed for d in _differences(stock, run())):
                    reordered = "the loss in chunks (above 128 MiB of logits; with loss='stock' bits are equal) adds"
        except Exception as error:
            raise PatchedStepError(f"only the patched step failed: {type(error).__name__}: {error}") from error
    loss, *gradients = _differences(stock, patched)
    in_order = (HALF_TOLERANCE if half else ORDER_TOLERANCE) if reordered else 0.0
    return StepComparison(
        losses=(stock["loss"].item(), patched["loss"].item()), loss=loss, gradients=tuple(gradients),
        repeat=repeat.relative, tolerance=max(allowed, in_order), reordered=reordered,
        stock=stock_kept, patched=patched_kept,
    )  # fmt: skip


def _differences(stock: dict[str, Tensor], other: dict[str, Tensor]) -> list[Difference]:
    """Compare the loss, which comes first, and each gradient that either step has."""
    norms = {name: float(value.double().norm()) for name, value in stock.items()}
    floor = 1e-3 * max((norm for name, norm in norms.items() if name != "loss"), default=0.0)
    if not floor or not all(map(math.isfinite, norms.values())):
        raise MeasureError(
            f"nothing to compare: {'all gradients are zero' if not floor else 'the loss or a gradient is not finite'}. "
            "Expected finite gradients, not all of them zero. Use another batch or dtype."
        )
    found = []
    for name in stock | other:
        if name not in stock or name not in other:
            found.append(Difference(name, equal=False, relative=math.inf))
            continue
        distance = float((other[name].double() - stock[name].double()).norm())
        scale = max(norms[name], 0.0 if name == "loss" else floor) or 1.0
        relative = distance / scale if math.isfinite(distance) else math.inf
        found.append(Difference(name, same_bits(stock[name], other[name]), relative))
    return found


@contextlib.contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Unpatch ``model`` inside, and restore it and random states after; yield what resets buffers and gradients."""
    modules = list(model.modules())
    owned = [(m._buffers, name, buffer) for m in modules for name, buffer in m._buffers.items() if buffer is not None]
    buffers = [(*own, own[-1].detach().clone()) for own in owned]

    @torch.no_grad()
    def start_over() -> None:
        for owner, name, buffer, values in buffers:
            owner[name] = buffer
            # Not all can be written to: one that was expanded overlaps itself, and one may be of inference mode.
            if type(buffer) is not Tensor or buffer.layout != torch.strided or not same_bits(buffer, values):
                buffer.copy_(values)
        model.zero_grad(set_to_none=True)

    with contextlib.ExitStack() as stack:  # what it calls back is called, even where another one fails
        for module in modules:
            own = {name: x for name, x in vars(module).items() if name == "training" or name.startswith("_memsave_")}
            stack.callback(vars(module).update, own)
            stack.callback(set_class, module, type(module))
        for parameter in model.parameters():
            stack.callback(setattr, parameter, "grad", parameter.grad)
        stack.callback(start_over)
        stack.callback(numpy.random.set_state, numpy.random.get_state())
        stack.callback(random.setstate, random.getstate())
        stack.enter_context(torch.random.fork_rng(range(torch.cuda.device_count())))
        stack.enter_context(only_measuring())
        unpatch(model)
        stack.callback(unpatch, model)
        yield start_over


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit: a NaN equals itself, and -0 is not 0."""
    return a.dtype == b.dtype and torch.equal(*(t.reshape(-1).contiguous().view(torch.uint8) for t in (a, b)))


@contextlib.contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Have PyTorch use deterministic algorithms alone inside; MeasureError if cuBLAS may have begun with others."""
    with contextlib.ExitStack() as stack:
        if (value := os.environ.get(_VARIABLE)) not in _VALUES:
            if torch.cuda.is_initialized():
                raise MeasureError(
                    f"deterministic kernels: expected {_VARIABLE}={_VALUES[0]} before CUDA is used, got {value!r}. "
                    "Set it in the environment that starts the process."
                )
            stack.callback(os.environ.update, {} if value is None else {_VARIABLE: value})
            stack.callback(os.environ.pop, _VARIABLE)
            os.environ[_VARIABLE] = _VALUES[0]
        mode = torch.get_deterministic_debug_mode()  # 1 if they are asked for by a warning, 2 by an error
        stack.callback(torch.use_deterministic_algorithms, mode > 0, warn_only=mode == 1)
        torch.use_deterministic_algorithms(True)
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # the backwards of all others add in no fixed order
        yield
