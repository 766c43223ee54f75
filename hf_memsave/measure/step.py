"""One training step of a model, stock and patched, compared to the bit; and kernels that give equal bits each time."""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_memsave.config.config import MemSaveLike
from hf_memsave.count.kept import Kept, measure_kept
from hf_memsave.errors import MeasureError, MemSaveError
from hf_memsave.logs import only_measuring
from hf_memsave.measure.inputs import cannot_run, device_of, forward_of, loss_of
from hf_memsave.patching.patch import patch, unpatch
from hf_memsave.patching.swap import set_class

#: On CUDA, where kernels add in no fixed order: how many of stock's own distances are allowed, as each is a draw.
DISTANCES = 2
#: The most that stock may be from itself for a comparison to tell anything, with 32-bit numbers and with 16-bit ones.
TOLERANCE, HALF_TOLERANCE = 1e-3, 2e-2
#: What is allowed of 32-bit numbers where modules run in rows, over which weight gradients are summed: some roundings.
TILES_TOLERANCE = 2.0**-16
#: How the names begin under which patching keeps things on a module.
_OURS = "_memsave_"
#: Read by cuBLAS once in a process, and the values under which its sums have a fixed order.
_VARIABLE, _VALUES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")


class StockStepError(MeasureError):
    """A step that fails stock."""


class PatchedStepError(MeasureError):
    """A step that works stock, and fails patched."""


@dataclass(frozen=True)
class Difference:
    """The loss or one parameter's gradient: whether the bits are equal, and the relative L2 distance to stock's."""

    name: str
    equal: bool
    relative: float  # to stock's norm, or to a thousandth of the largest of all: some gradients are rounding alone


@dataclass(frozen=True, kw_only=True, repr=False)
class StepComparison:
    """What :func:`compare_step` found."""

    losses: tuple[float, float]  # stock's and the patched model's
    loss: Difference
    gradients: tuple[Difference, ...]
    repeat: float  # the largest distance of stock from itself, run twice; zero on CPU
    tolerance: float  # the distance allowed: DISTANCES times ``repeat``; where that is zero, bits must be equal
    is_tiled: bool = False  # sums in another order are allowed as well
    stock: Kept
    patched: Kept

    def __repr__(self) -> str:
        equal = sum(d.equal for d in self.gradients)
        loss = f"loss {'equal' if self.loss.equal else 'different'}, {equal} of {len(self.gradients)} gradients equal"
        return f"StepComparison({loss} to the bit; stock {self.stock}, patched {self.patched})"

    @property
    def differing(self) -> tuple[Difference, ...]:
        """What is further from stock's than allowed, the worst first."""
        found = [d for d in (self.loss, *self.gradients) if not (d.equal or 0 <= d.relative < self.tolerance)]
        return tuple(sorted(found, key=lambda d: -d.relative))


def compare_step(
    model: nn.Module, batch: Mapping[str, Any], config: MemSaveLike = True, *, autocast: torch.dtype | None = None,
    seed: int = 0,
) -> StepComparison:  # fmt: skip
    """Run forward and backward stock (twice, to see that it repeats itself) and patched, each from the same seed.

    Equal bits are asked on CPU, under :func:`deterministic_kernels`, and wherever stock repeats itself; elsewhere on
    CUDA the measure is stock's own distance between its two runs. Where modules run in rows, weight gradients are sums
    in another order: :data:`TILES_TOLERANCE` is allowed, or :data:`HALF_TOLERANCE` with 16-bit numbers. The model,
    which returns a loss or a mapping with one, runs in the mode it is in; it and the random state are left as they
    were.

    Returns:
        Losses, gradients and kept bytes, compared.

    Raises:
        StockStepError: The stock step fails.
        MeasureError: It has no loss or no gradient, or does not repeat itself (on CUDA: by more than rounding).
        PatchedStepError: The patched step fails.
        PatchError: The model cannot be patched.
    """
    device, forward = device_of(model), forward_of(model, autocast)
    with left_as_it_was(model) as start_over:
        try:
            stock, again = (_step(model, forward, batch, start_over, seed) for _ in range(2))
        except MemSaveError as error:
            raise MeasureError(str(error)) from error
        except Exception as error:
            raise StockStepError(cannot_run(model, batch, error)) from error
        repeat = max(_differences(stock, again), key=lambda d: (not d.equal, d.relative))
        half = autocast is not None or any(g.dtype != torch.float32 for g in stock.values())
        asks_bits = device == "cpu" or torch.are_deterministic_algorithms_enabled()
        most = 0.0 if asks_bits else HALF_TOLERANCE if half else TOLERANCE
        if not repeat.equal and not repeat.relative < most:
            raise MeasureError(
                f"stock does not repeat itself: run twice from one seed, {repeat.name} differs by "
                f"{repeat.relative:.1e}. Expected {f'less than {most:g}' if most else 'equal bits'}. Take state and "
                "random numbers of its own out of the model's forward, or, if a kernel adds in no fixed order, "
                f"{'set OMP_NUM_THREADS=1' if device == 'cpu' else 'use deterministic kernels'}."
            )
        stock_kept = measure_kept(model, batch, forward)
        is_tiled = patch(model, config).config.checkpoint == "tiles"
        try:
            loss, *gradients = _differences(stock, patched := _step(model, forward, batch, start_over, seed))
            patched_kept = measure_kept(model, batch, forward)
        except Exception as error:
            raise PatchedStepError(
                f"the patched step failed, where stock's did not: {type(error).__name__}: {error}"
            ) from error
    return StepComparison(
        losses=(stock["loss"].item(), patched["loss"].item()),
        loss=loss,
        gradients=tuple(gradients),
        repeat=repeat.relative,
        tolerance=max(DISTANCES * repeat.relative, (HALF_TOLERANCE if half else TILES_TOLERANCE) * is_tiled),
        is_tiled=is_tiled,
        stock=stock_kept,
        patched=patched_kept,
    )


def _step(
    model: nn.Module, forward: Callable[..., Any], batch: Mapping[str, Any], start_over: Callable[[], None], seed: int
) -> dict[str, Tensor]:
    """The loss, and every gradient by its parameter's name."""
    start_over()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    loss = loss_of(forward(**batch), model, batch)
    loss.backward()
    gradients = {n: p.grad.to_dense() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"loss": loss.detach(), **gradients}


def _differences(stock: dict[str, Tensor], other: dict[str, Tensor]) -> list[Difference]:
    norms = {name: float(value.double().norm()) for name, value in stock.items()}
    floor = 1e-3 * max(norm for name, norm in norms.items() if name != "loss")
    if not floor or not all(map(math.isfinite, norms.values())):
        raise MeasureError(
            f"nothing to compare: {'all gradients are zero' if not floor else 'the loss or a gradient is not finite'}. "
            "Expected finite gradients, not all of them zero. Use another batch or dtype."
        )
    found = []
    for name in {**stock, **other}:
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
    """Run and patch ``model``, stock at first: at the end, or on an error, it and the random state are as they were.

    Yields:
        A function that puts buffers back and drops gradients in between.
    """
    owned = [(m._buffers, name, buffer) for m in model.modules() for name, buffer in m._buffers.items()]
    buffers = [(owner, name, buffer, buffer.detach().clone()) for owner, name, buffer in owned if buffer is not None]

    def start_over() -> None:
        for each in buffers:
            _put_back(*each)
        model.zero_grad(set_to_none=True)

    with contextlib.ExitStack() as stack:  # what it calls back is called, even where another one fails
        for each in buffers:
            stack.callback(_put_back, *each)
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
            stack.callback(_restore, module, type(module), _own(module))
        for parameter in model.parameters():
            stack.callback(setattr, parameter, "grad", parameter.grad)
        stack.callback(numpy.random.set_state, numpy.random.get_state())
        stack.callback(random.setstate, random.getstate())
        stack.enter_context(torch.random.fork_rng(range(torch.cuda.device_count())))
        stack.enter_context(only_measuring())
        unpatch(model)
        yield start_over


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether the numbers are equal, bit for bit: a NaN is itself, and -0 is not 0."""
    return a.dtype == b.dtype and torch.equal(*(t.reshape(-1).contiguous().view(torch.uint8) for t in (a, b)))


@torch.no_grad()
def _put_back(owner: dict[str, Tensor | None], name: str, buffer: Tensor, values: Tensor) -> None:
    owner[name] = buffer
    # Not all can be written to: one that was expanded overlaps itself, and one may be of inference mode.
    if type(buffer) is not Tensor or buffer.layout != torch.strided or not same_bits(buffer, values):
        buffer.copy_(values)


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name.startswith(_OURS)}


def _restore(module: nn.Module, cls: Any, own: dict[str, Any]) -> None:
    set_class(module, cls)
    for name in _own(module):
        del module.__dict__[name]
    module.__dict__.update(own)


@contextlib.contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Inside, PyTorch takes deterministic algorithms alone; MeasureError if cuBLAS may have begun with others."""
    with contextlib.ExitStack() as stack:
        if (value := os.environ.get(_VARIABLE)) not in _VALUES:
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                raise MeasureError(
                    f"deterministic kernels: expected {_VARIABLE}={_VALUES[0]} before CUDA is used, got {value!r}. "
                    "Set it in the environment that starts the process."
                )
            stack.callback(os.environ.update, {} if value is None else {_VARIABLE: value})
            stack.callback(os.environ.pop, _VARIABLE)
            os.environ[_VARIABLE] = _VALUES[0]
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        is_on = torch.are_deterministic_algorithms_enabled()
        stack.callback(torch.use_deterministic_algorithms, is_on, warn_only=warns)
        torch.use_deterministic_algorithms(True)
        stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
        torch.backends.cudnn.benchmark = False  # else it picks by time, and not the same each time
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # the backwards of all others add in no fixed order
        yield
