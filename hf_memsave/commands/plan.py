"""``memsave plan``: the cheapest setting whose training step fits, from the configuration alone."""

from __future__ import annotations

import argparse

from rich.console import Console

from hf_memsave import MemSaveConfig
from hf_memsave.commands.estimate import add_step, step_of
from hf_memsave.commands.options import add, progress_bar
from hf_memsave.measure.models import at_depth, depth_of, load_config
from hf_memsave.planner.plan import largest, plan


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.description = (
        "Finds how many layers have to run how much again in backward, and whether to offload, for a training step to "
        "fit, and writes the configuration. It estimates as memsave estimate does."
    )
    add(parser, "model")
    option = parser.add_argument
    option("--budget", metavar="SIZE", required=True, help="what there is, such as 24GiB")
    add(parser, "--memsave", help="a preset or YAML file to begin with (%(default)s)")
    option("--lossy", nargs="+", choices=["int8", "int4"], default=(), help="codecs that may be used: approximate")
    option("--device", choices=["a100", "h100", "rtx4090"], default="a100", help="whose speed counts (%(default)s)")
    option("--main-memory", metavar="SIZE", help="what offload may take, such as 64GiB (any amount)")
    option("--largest", action="store_true", help="tell the largest batch and the longest sequence, too")
    add_step(parser)
    add(parser, "--out")


def run(args: argparse.Namespace) -> int:
    """Plan, print, and write what was asked for; returns 0."""
    options = step_of(args) | {
        "budget": args.budget, "memsave": MemSaveConfig.named(args.memsave), "rates": args.device,
        "devices": args.devices, "sharding": args.sharding,
    }  # fmt: skip
    config = load_config(args.model)
    if args.layers:
        config = at_depth(config, depth_of(config, args.layers))
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with progress_bar(console, "Tracing a few layers") as tell:
        found = plan(config, lossy=args.lossy, main_memory=args.main_memory, **options, progress=tell)
        most = largest(config, **options, progress=tell) if args.largest else {}
    console.print(str(found))
    for name, (batch, tokens) in most.items():
        console.print(
            f"{name}: the largest batch is {batch} (of {args.seq_len} tokens), the longest sequence {tokens}."
        )
    if args.out:
        found.config.to_file(args.out)
        console.print(f"Configuration: {args.out}")
    return 0
