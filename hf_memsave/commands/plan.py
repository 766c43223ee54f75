"""``memsave plan``: the cheapest setting whose training step fits, from the configuration alone."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from hf_memsave import MemSaveConfig
from hf_memsave.commands import check_folder
from hf_memsave.commands.estimate import add_step, progress_bar, step_of
from hf_memsave.commands.options import add_config, quiet


def add_to(commands: Any) -> None:
    """Add this command to the subparsers of ``memsave``."""
    parser = commands.add_parser(
        "plan",
        help="the cheapest setting whose training step fits a GPU: no weights, no GPU",
        description="Finds how many layers have to run how much again in backward, and whether to offload, for a "
        "training step to fit, and writes the configuration. It estimates as memsave estimate does.",
    )
    add_config(parser)
    add = parser.add_argument
    add("--budget", metavar="SIZE", required=True, help="what there is, such as 24GiB")
    add("--memsave", metavar="PRESET", default="exact", help="a preset or YAML file to begin with (%(default)s)")
    add("--lossy", nargs="+", choices=["int8", "int4"], default=(), help="codecs that may be used: approximate")
    add("--device", choices=["a100", "h100", "rtx4090"], default="a100", help="whose speed counts (%(default)s)")
    add("--main-memory", metavar="SIZE", help="what offload may take, such as 64GiB (any amount)")
    add("--largest", action="store_true", help="tell the largest batch and the longest sequence, too")
    add_step(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the configuration, as YAML or .json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan, print, and write what was asked for.

    Returns:
        0.

    Raises:
        CommandError: The options contradict each other.
        MemSaveError: Nothing fits, or the step cannot be estimated.
    """
    if args.out:
        check_folder(args.out)
    training = step_of(args)

    from hf_memsave.measure.layers import at_depth, depth_fields
    from hf_memsave.measure.models import load_config
    from hf_memsave.planner.plan import largest, plan

    quiet()
    config = load_config(args.model)
    if args.layers:
        config = at_depth(config, dict.fromkeys(depth_fields(config), args.layers))
    console = Console(highlight=False)
    with progress_bar(console, "Tracing a few layers") as tell:
        options: dict[str, Any] = dict(
            budget=args.budget, memsave=MemSaveConfig.named(args.memsave), rates=args.device, devices=args.devices,
            sharding=args.sharding, progress=tell, **training,
        )  # fmt: skip
        found = plan(config, lossy=args.lossy, main_memory=args.main_memory, **options)
        most = largest(config, **options) if args.largest else {}
    console.print(str(found), markup=False, soft_wrap=True)
    for name, (batch, tokens) in most.items():
        text = f"{name}: the largest batch is {batch} (of {args.seq_len} tokens), the longest sequence {tokens}."
        console.print(text, markup=False, soft_wrap=True)
    if args.out:
        found.config.to_file(args.out)
        console.print(f"Configuration: {args.out}", markup=False)
    return 0
