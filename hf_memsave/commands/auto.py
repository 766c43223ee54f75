"""``memsave auto``: what to convert in your own model, for your batch and your memory."""

from __future__ import annotations

import argparse

import yaml

from hf_memsave import MemSaveConfig, MemSaveError
from hf_memsave.commands.inputs import add_inputs, load_inputs, new_console
from hf_memsave.commands.options import DTYPES, GIVE_ANOTHER_BATCH, NUMBER, SIZE, CommandError, add
from hf_memsave.config.sizes import gib
from hf_memsave.measure.inputs import cannot_run, forward_of
from hf_memsave.planner import fast, smart


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.description = (
        "Tries a model, stock and converted, on a batch, and writes the configuration it found. --smart keeps the "
        "batch and converts as few blocks of each kind as it takes to fit; --fast asks whether converting everything "
        "pays, by the larger batch that then fits. Memory is counted: what is kept between forward and backward, "
        "parameters, gradients, and AdamW's state; leave room for what backward computes and drops again."
    )
    add_inputs(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--smart", action="store_true", help="as few conversions as it takes (this is the default)")
    how.add_argument("--fast", action="store_true", help="everything, or nothing where that trains faster")
    limit = "the limit, such as 16GiB (on CUDA: nine tenths of what the device has left)"
    parser.add_argument("--memory", **SIZE, help=limit)
    add(parser, "--memsave", help="what to convert to (%(default)s)")
    parser.add_argument("--max-batch", **NUMBER, help="with --fast, the largest batch to try")
    add(parser, "--out")


def run(args: argparse.Namespace) -> int:
    """Load, try, print and write; returns 0."""
    memsave = MemSaveConfig.named(args.memsave)
    if args.max_batch and not args.fast:
        raise CommandError("--max-batch limits the batches of --fast, got --smart. Add --fast, or leave it out.")
    if args.memory is None and args.device == "cpu":
        raise CommandError("--device cpu: expected --memory, such as --memory 16GiB, got none. Say how much there is.")
    console = new_console()
    model, batch, title = load_inputs(args, console)
    forward = forward_of(model, DTYPES.get(args.autocast))
    most = {"max_batch": args.max_batch} if args.fast else {}
    try:
        with console.status("Trying ..."):
            plan = (fast if args.fast else smart)(model, batch, memsave, args.memory, forward=forward, **most)
    except MemSaveError:
        raise
    except Exception as error:
        raise CommandError(f"{cannot_run(model, batch, error)} {GIVE_ANOTHER_BATCH}") from error
    console.print(title, style="bold")
    context = [args.memsave if memsave.is_exact else f"{args.memsave} (gradients are approximate)", args.device]
    context += [f"limit {gib(plan.memory)}", *(["bf16 autocast"] if args.autocast else [])]
    console.print(f"preset {', '.join(context)}", str(plan), sep="\n", soft_wrap=True)
    if plan.config is None:
        console.print("Train without memsave: there is no configuration to write.")
    elif args.out is None:
        console.print(yaml.safe_dump(plan.config.to_dict()), end="")
    else:
        plan.config.to_file(args.out)
        console.print(f"Configuration: {args.out}")
    return 0
