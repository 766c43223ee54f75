"""``memsave verify``: one training step of your own model and batch, stock and patched, compared to the bit."""

from __future__ import annotations

import argparse
import contextlib
import sys
from functools import partial
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hf_memsave import MemSaveConfig
from hf_memsave.commands import GIVE_ANOTHER_BATCH, CommandError, positive_int
from hf_memsave.commands.inputs import add_inputs, load_inputs
from hf_memsave.measure.deterministic import deterministic_kernels
from hf_memsave.measure.inputs import described
from hf_memsave.measure.step import (
    DISTANCES,
    FORWARDS,
    Difference,
    PatchedStepError,
    StepComparison,
    StockStepError,
    compare_step,
)
from hf_memsave.sizes import MIB

_WORST = 5


def add_to(commands: Any) -> None:
    """Add this command to the subparsers of ``memsave``."""
    parser = commands.add_parser(
        "verify",
        help="one training step of your model and batch, stock and patched, compared to the bit",
        description="Runs one forward and backward of a model, stock and patched, from the same seed, and compares the "
        "loss, every gradient and the bytes kept in between. Exit status 0 if they are equal: to the bit, or, where "
        f"stock run twice differs from itself (CUDA's kernels add in no fixed order), within {DISTANCES} times that "
        "distance. 1 if they differ, 2 if the step cannot be run.",
    )
    add_inputs(parser)
    parser.add_argument("--memsave", metavar="PRESET", default="exact", help="a preset or YAML file (%(default)s)")
    parser.add_argument(
        "--layers", type=positive_int, metavar="N", help="with random weights, the depth (all layers, or 2 of too many)"
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="ask for equal bits on CUDA too: under PyTorch's deterministic algorithms, attention as products of "
        "matrices",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load, compare and print.

    Returns:
        0, or 1 if the patched step fails, or differs by more than allowed.

    Raises:
        CommandError: The options contradict each other, or the stock step fails.
        MeasureError: Model or batch cannot be loaded, or there is nothing to compare.
    """
    memsave = MemSaveConfig.named(args.memsave)
    console = Console(highlight=False)
    try:
        with deterministic_kernels() if args.deterministic else contextlib.nullcontext():
            inputs = load_inputs(args, console, may_shrink=True)
            model, batch = inputs.model, inputs.batch
            with Progress(console=console, transient=True) as progress:
                bar = progress.add_task("Running", total=FORWARDS)
                advance = partial(progress.advance, bar)
                found = compare_step(model, batch, memsave, autocast=inputs.autocast, advance=advance)
    except StockStepError as error:
        without = " Leave --deterministic out if an op has no such algorithm." if args.deterministic else ""
        raise CommandError(f"{error} {GIVE_ANOTHER_BATCH}{without}") from error
    except PatchedStepError as error:
        print(f"memsave verify: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    size = sum(p.numel() for p in model.parameters())
    context = [
        f"preset {args.memsave}",
        f"{size / 1e6:,.1f} M parameters",
        args.device,
        *(["bf16 autocast"] if args.autocast else []),
        *(["deterministic algorithms"] if args.deterministic else []),
    ]
    console.print(f"{type(model).__name__}, {inputs.weights}: {described(batch)}", style="bold", markup=False)
    console.print(", ".join(context), *_tables(found), _verdict(found), sep="\n")
    if found.differing:
        print(f"memsave verify: {_causes(found)}", file=sys.stderr)
    return int(bool(found.differing))


def _tables(found: StepComparison) -> list[Table]:
    table = Table("", "stock", "patched", "", box=box.SIMPLE_HEAD)
    table.add_row("loss", *(f"{loss:.7g}" for loss in found.losses), _distance(found.loss))
    equal, count = sum(d.equal for d in found.gradients), len(found.gradients)
    table.add_row("gradients", "", "", f"{equal} of {count} equal to the bit")
    kept = [f"{kept.total / MIB:,.2f}" for kept in (found.stock, found.patched)]
    table.add_row("kept MiB", *kept, f"{found.stock.total / max(found.patched.total, 1):.2f}x less")
    if equal == count:
        return [table]
    worst = Table("worst gradients", "relative L2 distance", box=box.SIMPLE_HEAD)
    for d in sorted((d for d in found.gradients if not d.equal), key=lambda d: -d.relative)[:_WORST]:
        worst.add_row(d.name, _distance(d))
    return [table, worst]


def _verdict(found: StepComparison) -> str:
    if all(d.equal for d in (found.loss, *found.gradients)):
        return f"Equal to the last bit: the loss and all {len(found.gradients)} gradients."
    if found.differing:
        gradients = [d for d in found.differing if d is not found.loss]
        loss = "" if found.loss not in found.differing else " and the loss"
        return f"Different: {len(gradients)} of {len(found.gradients)} gradients{loss}."
    return (
        f"Equal within {found.tolerance:.1e}: kernels add in no fixed order, and stock run twice differs from itself "
        f"by up to {found.repeat:.1e}, of which {DISTANCES} times are allowed. --deterministic asks for equal bits."
    )


def _causes(found: StepComparison) -> str:
    expected = (
        f"less than {found.tolerance:.1e}, {DISTANCES} times stock's own distance from itself"
        if found.tolerance
        else "equal bits"
    )
    worst = found.differing[0]
    return (
        f"{worst.name} differs by {worst.relative:.1e}; expected {expected}. Look first for code in the model that "
        "writes to an activation through NumPy or a pointer: nothing can see that, and what is computed again from "
        "that activation is then wrong. Write with torch, or to a copy. Under autocast, bits may also differ where "
        "docs/limits.md says so (What is exact). Otherwise please report this, with the versions that `memsave doctor` "
        "prints."
    )


def _distance(difference: Difference) -> str:
    return "equal to the bit" if difference.equal else f"{difference.relative:.1e}"
