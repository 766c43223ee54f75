"""``memsave auto``: what to convert in your own model, for your batch and your memory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from hf_memsave import MemSaveConfig, MemSaveError
from hf_memsave.commands import GIVE_ANOTHER_BATCH, CommandError, check_folder, positive_int
from hf_memsave.commands.inputs import add_inputs, load_inputs
from hf_memsave.measure.inputs import described
from hf_memsave.measure.step import cannot_run
from hf_memsave.planner import Plan, fast, smart
from hf_memsave.sizes import bytes_of, gib


def add_to(commands: Any) -> None:
    """Add this command to the subparsers of ``memsave``."""
    parser = commands.add_parser(
        "auto",
        help="what to convert in your model, for your batch and your memory",
        description="Tries a model, stock and converted, on a batch, and writes the configuration it found. --smart "
        "keeps the batch and converts as few blocks of each kind as it takes to fit; --fast asks whether converting "
        "everything pays, by the larger batch that then fits. Memory is counted: what is kept between forward and "
        "backward, parameters, gradients, and AdamW's state; leave room for what backward computes and drops again.",
    )
    add_inputs(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--smart", action="store_true", help="as few conversions as it takes (this is the default)")
    how.add_argument("--fast", action="store_true", help="everything, or nothing where that trains faster")
    parser.add_argument(
        "--memory",
        type=_size,
        metavar="SIZE",
        help="the limit, such as 16GiB (on CUDA: nine tenths of what the device has left)",
    )
    parser.add_argument("--memsave", metavar="PRESET", default="exact", help="what to convert to (%(default)s)")
    parser.add_argument("--max-batch", type=positive_int, metavar="N", help="with --fast, the largest batch to try")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the configuration, as YAML or .json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load, try, print and write.

    Returns:
        0.

    Raises:
        CommandError: The options contradict each other, or the step cannot be run.
        MemSaveError: The model cannot be patched, or does not fit.
    """
    memsave = MemSaveConfig.named(args.memsave)
    if args.max_batch and not args.fast:
        raise CommandError("--max-batch limits the batches of --fast, got --smart. Add --fast, or leave it out.")
    if args.memory is None and args.device == "cpu":
        raise CommandError("--device cpu: expected --memory, such as --memory 16GiB, got none. Say how much there is.")
    if args.out:
        check_folder(args.out)
    console = Console(highlight=False)
    inputs = load_inputs(args, console)
    options: dict[str, Any] = {"forward": inputs.forward} | ({"max_batch": args.max_batch} if args.fast else {})
    try:
        with console.status("Trying ..."):
            plan = (fast if args.fast else smart)(inputs.model, inputs.batch, memsave, args.memory, **options)
    except MemSaveError:
        raise
    except Exception as error:
        raise CommandError(f"{cannot_run(inputs.model, inputs.batch, error)} {GIVE_ANOTHER_BATCH}") from error
    title = f"{type(inputs.model).__name__}, {inputs.weights}: {described(inputs.batch)}"
    console.print(title, style="bold", markup=False)
    preset = args.memsave if memsave.is_exact else f"{args.memsave} (gradients are approximate)"
    context = [f"preset {preset}", args.device, f"limit {gib(plan.memory)}"]
    console.print(", ".join([*context, *(["bf16 autocast"] if args.autocast else [])]), _table(plan), sep="\n")
    console.print(plan.reason)
    _write(plan, args.out, console)
    return 0


def _size(text: str) -> int:
    try:
        return bytes_of(text)
    except MemSaveError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _table(plan: Plan) -> Table:
    table = Table("converted", box=box.SIMPLE_HEAD)
    for header in ("batch", "kept", "needed", "", "seconds"):
        table.add_column(header, justify="left" if not header else "right")
    for t in plan.trials:
        seconds = "" if t.seconds is None else f"{t.seconds:.4f}"
        fits = "fits" if t.fits else "too much"
        table.add_row(t.name, str(t.batch_size), gib(t.kept), gib(t.needed), fits, seconds)
    return table


def _write(plan: Plan, out: Path | None, console: Console) -> None:
    if plan.config is None:
        console.print("Train without memsave: there is no configuration to write.")
    elif out is None:
        console.print(yaml.safe_dump(plan.config.to_dict()), markup=False, end="")
    else:
        plan.config.to_file(out)
        console.print(f"Configuration: {out}", markup=False)
