"""``memsave plan``: the cheapest setting whose training step fits, from the configuration alone."""

from __future__ import annotations

import argparse
from typing import Any

from hf_memsave.commands.arguments import memsave_of
from hf_memsave.commands.options import console_of, setting_in_words, settle_sizes, step_of, write_figures
from hf_memsave.commands.progress import progress
from hf_memsave.measure.models import at_depth, depth_of, load_config
from hf_memsave.planner.plan import plan


def run(args: argparse.Namespace) -> int:
    """Plan, print, and write what was asked for; return 0."""
    config, console = load_config(args.model), console_of(args, soft_wrap=True)
    note = settle_sizes(args, config)
    if args.layers:
        config = at_depth(config, depth_of(config, args.layers))
    with progress(console, "Tracing a few layers ..."):
        found = plan(config, memsave=memsave_of(args), **step_of(args, "budget", "main_memory", "devices", "sharding"))
    console.print(f"{note}{setting_in_words(args)}\n{found}")
    name = args.out or "plan.yaml"
    written = f"Configuration: {name}." if args.out else f"--out {name} writes the configuration."
    told = f'{written} Use it: Trainer(..., memsave="{name}"), or hf_memsave.patch(model, "{name}").'
    if found.config is None:
        told = "Train without memsave: there is no configuration to write."
        told += f" {name} is of an earlier plan." * bool(args.out and args.out.exists())
    elif args.out:
        found.config.to_file(args.out)
    console.print(told)
    figures: dict[str, Any] = {name: getattr(args, name) for name in ("model", "batch_size", "seq_len", "budget")}
    for what, rows in (("fitting", found.fitting), ("tried", found.tried)):
        figures[what] = [{name: getattr(one, name) for name in ("name", "needed", "away", "cost")} for one in rows]
    figures |= {"best": found.best.name, "config": found.config and found.config.to_dict(), "stock": found.stock}
    write_figures(args.json, figures, console)
    return 0
