"""``memsave demo``: train two small models, stock and patched, and compare everything."""

from __future__ import annotations

import argparse
import math
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from hf_memsave.commands import check_picture, positive_int
from hf_memsave.sizes import MIB

if TYPE_CHECKING:
    from hf_memsave.commands.demo_task import DemoTask
    from hf_memsave.commands.demo_training import Run

_STEPS, _QUICK_STEPS = 240, 70


def add_to(commands: Any) -> None:
    """Add this command to the subparsers of ``memsave``."""
    parser = commands.add_parser(
        "demo",
        help="train a small BERT and a small LLaMA, stock and patched, and compare",
        description="Trains a small BERT and a small LLaMA from random weights with transformers.Trainer on the CPU, "
        "each stock and patched from the same seed, and compares losses, accuracy, kept memory and time. Exit status 1 "
        "if a loss or a weight differs in a single bit.",
    )
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="a folder of official GLUE files; without it, data is generated"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help=f"{_QUICK_STEPS} steps instead of {_STEPS}")
    length.add_argument("--steps", type=positive_int, metavar="N", help="so many steps")
    parser.add_argument(
        "--out", type=Path, metavar="PNG", help="the picture to write (demo.png, if matplotlib is installed)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, compare, print the table and write the picture.

    Returns:
        0, or 1 if a patched run differs from its stock one.
    """
    has_picture = args.out is not None or find_spec("matplotlib") is not None
    out = args.out or Path("demo.png")
    if has_picture:
        check_picture(out)
    from hf_memsave.commands import demo_task, demo_training

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # models this small gain little from more, and lose much where other programs run
    steps = args.steps or (_QUICK_STEPS if args.quick else _STEPS)
    examples = steps * demo_training.BATCH_SIZE
    if args.data_dir:
        task = demo_task.glue_task(args.data_dir, examples)
    else:
        task = demo_task.generated_task(examples, demo_training.SEED)
    console = Console(highlight=False)
    console.print(task.description, task.limits, sep="\n", markup=False)
    configs = demo_training.model_configs(task)
    done = {}
    with _progress(console) as progress:
        bars = {
            (name, patched): progress.add_task(f"{name} {'patched' if patched else 'stock'}", total=steps, start=False)
            for name in configs
            for patched in (False, True)
        }
        for (name, patched), bar in bars.items():
            progress.start_task(bar)
            advance = partial(progress.advance, bar)
            done[name, patched] = demo_training.train(configs[name], task, steps, patched=patched, advance=advance)
    runs = {name: (done[name, False], done[name, True]) for name in configs}

    console.print(results_table(runs, task))
    for line in unlearned(runs, task, steps):
        console.print(line, markup=False)
    if has_picture:
        from hf_memsave.commands.pictures import demo_picture

        demo_picture(out, task.description, runs)
        console.print(f"Picture: {out}", markup=False)
    else:
        console.print("No picture: that needs matplotlib. Run: pip install 'hf_memsave[plot]'", markup=False)
    failures = {name: found for name, pair in runs.items() if (found := demo_training.difference(*pair))}
    for name, found in failures.items():
        print(
            f"memsave demo: {name}: {found}. Expected equal bits. Please report this, with the versions of torch and "
            "transformers.",
            file=sys.stderr,
        )
    if not failures:
        console.print(f"Stock and patched agree to the last bit in all {steps} losses and in every trained weight.")
    return int(bool(failures))


def unlearned(runs: dict[str, tuple[Run, Run]], task: DemoTask, steps: int) -> list[str]:
    """A line for each model that is no better than the most frequent answer by two standard errors of its accuracy."""
    found = []
    for name, (stock, _) in runs.items():
        error = math.sqrt(stock.accuracy * (1 - stock.accuracy) / len(task.dev))
        if stock.accuracy <= task.majority + 2 * error:
            found.append(
                f"{name} has not learned this: it is right in {stock.accuracy:.1%} of {len(task.dev)} dev examples "
                f"(standard error {error:.1%}), and the most frequent answer in {task.majority:.1%}. {steps} steps "
                "from random weights are too few; what is compared is bits, bytes and time."
            )
    return found


def results_table(runs: dict[str, tuple[Run, Run]], task: DemoTask) -> Table:
    """Two rows for each model: stock, and patched below it."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("model")
    table.add_column("run")
    for header in ("final loss", "dev accuracy", "majority", "kept MiB", "ratio", "s/step"):
        table.add_column(header, justify="right")
    for name, pair in runs.items():
        for label, run in zip(("stock", "patched"), pair, strict=True):
            ratio = pair[0].kept.total / run.kept.total
            table.add_row(
                name if run is pair[0] else "",
                label,
                f"{run.losses[-1]:.6f}",
                f"{run.accuracy:.1%}",
                f"{task.majority:.1%}",
                f"{run.kept.total / MIB:.1f}",
                f"{ratio:.2f}x",
                f"{run.seconds_per_step:.3f}",
                end_section=run is pair[1],
            )
    return table


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
