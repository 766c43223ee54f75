"""Time of a step and of its forward, patched over stock, where only the host counts and where the kernels do too.

    python scripts/bench/host_time.py [--families bert llama] [--seconds 30] [--out [DIR]]

At batch 1 and 8 tokens what is left of a step is Python, PyTorch's dispatcher and the reading of weights; 4 x 128
tokens is a small real step. Stock and patched take alternating steps in one run, in turn first, so that a drift of the
machine meets both. The ratio is that of the medians; beside it that of the means of the quickest tenth, which other
work on the machine disturbs least. Time is that of the process on the CPU, which on a busy machine leaves out the
waiting (--clock wall for that). A step is one forward and backward. No dropout, fp32.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from hf_memsave import patch
from publish import arguments, machine, publish
from support.families import FAMILIES, Size, batch_for, build  # found by publish

#: Batch and tokens; and the most that the time should be of stock's: of the step, of its forward.
SHAPES = {"1 x 8": (1, 8, {"step": 1.35, "forward": 1.6}), "4 x 128": (4, 128, {"step": 1.10})}
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
FEWEST, WARM_UP = 20, 3


@dataclass
class Times:
    """Seconds of each step of one model, and of its forward."""

    forward: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> None:
    """Time every family at every shape and print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=["bert", "gpt2", "llama"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=30.0, help="of alternating steps, for each family and shape")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    runs = [(family, shape) for family in options.families for shape in SHAPES]
    found: dict[str, dict[str, Any]] = {family: {} for family in options.families}
    rows = []
    for family, shape in track(runs, description="timing", console=Console(stderr=True)):
        found[family][shape] = ratios(*alternate(family, shape, options))
        rows.append([family, shape, *cells(found[family][shape], SHAPES[shape][2])])
    header = ["family", "batch x tokens", "steps"]
    for part in ("step", "forward"):
        header += [f"{part}, stock, ms", "patched / stock", "quickest tenth", "limit"]
    model = f"{options.layers} layers of hidden {options.hidden}, fp32"
    title = f"Host time, patched over stock: {model}, {options.clock} time; {machine()}"
    publish("host-time", title, header, rows, {"families": found}, options.out)


def made(family: str, shape: str, options: argparse.Namespace, patched: bool) -> tuple[nn.Module, dict[str, Any]]:
    """A model without dropout in training mode, and a batch."""
    batch, tokens, _ = SHAPES[shape]
    size = Size(hidden=options.hidden, heads=4, layers=options.layers, batch=batch, seq=tokens)
    model = build(family, size, dropout=0.0)
    if patched:
        patch(model, True)
    return model, batch_for(model, size)


def alternate(family: str, shape: str, options: argparse.Namespace) -> tuple[Times, Times]:
    """Steps of stock and of patched in turn, until the time is up."""
    models = [made(family, shape, options, patched) for patched in (False, True)]
    times, clock = [Times(), Times()], CLOCKS[options.clock]
    for model, batch in models * WARM_UP:
        take_step(model, batch, Times(), clock)
    gc.collect()
    gc.freeze()  # the collector stays on, but does not look at the libraries' objects
    end = time.perf_counter() + options.seconds
    try:
        while time.perf_counter() < end or len(times[0].step) < FEWEST:
            order = (0, 1) if len(times[0].step) % 2 else (1, 0)
            for index in order:
                take_step(*models[index], times[index], clock)
    finally:
        gc.unfreeze()
    return times[0], times[1]


def take_step(
    model: nn.Module, batch: dict[str, Any], times: Times, clock: Callable[[], float] = time.process_time
) -> None:
    """One step; clearing its gradients is not timed."""
    start = clock()
    loss = model(**batch).loss
    middle = clock()
    loss.backward()
    end = clock()
    times.forward.append(middle - start)
    times.step.append(end - start)
    model.zero_grad()


def ratios(stock: Times, patched: Times) -> dict[str, Any]:
    """Patched over stock, of step and forward, and stock's own median in seconds."""
    found: dict[str, Any] = {"steps": len(stock.step)}
    for part in ("step", "forward"):
        ours, theirs = getattr(patched, part), getattr(stock, part)
        found[part] = {
            "stock_median": statistics.median(theirs),
            "median": statistics.median(ours) / statistics.median(theirs),
            "quickest_tenth": quickest_tenth(ours) / quickest_tenth(theirs),
        }
    return found


def quickest_tenth(seconds: list[float]) -> float:
    """The mean of the quickest tenth of all steps."""
    return statistics.fmean(sorted(seconds)[: max(1, len(seconds) // 10)])


def cells(found: dict[str, Any], limits: dict[str, float]) -> list[str]:
    """Of a row of the table."""
    shown = [str(found["steps"])]
    for part in ("step", "forward"):
        of = found[part]
        shown += [f"{1e3 * of['stock_median']:.2f}", f"{of['median']:.3f}", f"{of['quickest_tenth']:.3f}"]
        shown += [f"{limits[part]:.2f}" if part in limits else ""]
    return shown


if __name__ == "__main__":
    main()
