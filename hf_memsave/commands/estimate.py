"""``memsave estimate``: whether a training step fits a GPU, from the configuration alone."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from hf_memsave.commands.arguments import memsave_in_words, memsave_of
from hf_memsave.commands.options import (
    console_of,
    name_of,
    setting_in_words,
    settle_sizes,
    step_in_words,
    step_of,
    write_figures,
)  # fmt: skip
from hf_memsave.commands.progress import progress
from hf_memsave.config.sizes import gib
from hf_memsave.errors import CommandError, MemSaveError
from hf_memsave.measure.estimate import Estimate, estimate
from hf_memsave.measure.largest import largest
from hf_memsave.measure.models import at_depth, load_config
from hf_memsave.measure.training import Training


def run(args: argparse.Namespace) -> int:
    """Estimate, print, and write; return 0, or 1 if it does not fit, or if ``--check`` finds other figures."""
    if args.check and not torch.cuda.is_available():
        raise CommandError("--check: expected a CUDA device to run the step on, found none. Leave it out.")
    config, console = load_config(args.model), console_of(args, soft_wrap=True)
    note = settle_sizes(args, config)
    with progress(console, "Tracing a few layers ..."):
        result = estimate(config, memsave=memsave_of(args), **step_of(args, "memory", "devices", "sharding", "layers"))
    console.print(f"{note}{setting_in_words(args, step_in_words(args, result))}\n{result}")
    figures, agrees = {"model_or_config": args.model, **result.to_dict()}, True
    if args.memory:
        figures |= _within(args, config, result, console)
    if args.html:
        from hf_memsave.commands.estimate_page import write_page

        write_page(args.html, result, name_of(args.model), _settings(args, result), figures.get("what_fits", ()))
        console.print(f"Page: {args.html}")
    if args.check:
        figures["check"], agrees = _check(args, config, result, console)
    write_figures(args.json, figures, console)
    return int(result.fits is False or not agrees)


def _settings(args: argparse.Namespace, result: Estimate) -> dict[str, str]:
    """Describe for the page what was estimated: the step in words, and each option of it that is set."""
    words = {"step": step_in_words(args, result), "patched": f"preset {memsave_in_words(args)}"}
    words["trained"] = f"LoRA: {args.lora}" if args.lora else "all parameters"
    for name in ("optimizer", "quantized", "checkpointing", "accumulation", "attention", "padded", "holds_output"):
        if value := getattr(args, name):
            words[name.replace("_", " ")] = "yes" if value is True else str(value)
    return words | ({"GPUs": f"{args.devices}, {args.sharding}; figures are of one"} if args.devices > 1 else {})


def _check(args: argparse.Namespace, config: Any, result: Estimate, console: Console) -> tuple[dict[str, Any], bool]:
    """Run the step and print its bytes beside the predicted ones; return the figures, and whether they agree."""
    from hf_memsave.measure.check import SLACK, check

    try:
        with progress(console, "Running the step ..."):
            found = check(config, result, Training(**step_of(args)), memsave_of(args))
    except MemSaveError as error:
        raise CommandError(f"--check: {error.on_command_line}") from error
    table = Table("", "predicted", "measured", "difference", box=box.SIMPLE_HEAD)
    for name, one in found.items():
        for what in SLACK:
            figures = gib(one.predicted[what]), gib(one.measured[what]), f"{one.difference(what):+.2%}"
            table.add_row(f"{name}, {what}", *figures)
    how = f"Check on {torch.cuda.get_device_name()}: what PyTorch's allocator gives out, without cuBLAS's workspaces."
    console.print(how, table, sep="\n")
    for name in {"stock", "patched"} - found.keys():
        console.print(f"{name}: the step was not run, as it is too large for this machine.")
    allowed = ", ".join(f"{what} {slack:.0%}" for what, slack in SLACK.items())
    agrees = all(one.agrees for one in found.values())
    console.print(f"The differences are {'' if agrees else 'not '}within what is allowed ({allowed}).")
    return found, agrees


def _within(args: argparse.Namespace, config: Any, result: Estimate, console: Console) -> dict[str, Any]:
    """Print and return the "largest" batch and sequence that fit, and "what_fits" where the step does not."""
    memsave, training, shards, found = memsave_of(args), Training(**step_of(args)), (args.sharding, args.devices), {}
    with progress(console, "Looking for what fits ..."):
        for label, chosen in (("stock", None), ("patched", memsave)):
            step, names = (config, result.depth, training, chosen), ["batch_size", *["seq_len"] * bool(result.u)]
            found[label] = most = {name: largest(*step, name, args.memory, shards) for name in names}
            told = f"the largest batch that fits is {most['batch_size']}"
            if result.u:
                told += f" (of {args.seq_len} tokens), the longest sequence {most['seq_len']} (batch {args.batch_size})"
            console.print(f"{label}: {told if any(most.values()) else 'no batch fits, not even of 8 tokens'}.")
    if result.fits or not result.depth:  # of which there is a plan
        return {"largest": found}
    from hf_memsave.planner.plan import Settings, what_fits

    with progress(console, "Looking for what makes it fit ..."):
        settings = Settings(at_depth(config, result.depth), result.depth, training, shards, memsave)
        changes = what_fits(settings, settings.way(memsave.checkpoint, memsave.offload), args.memory)
    each = f"Each of these alone makes it fit, patched: {'; '.join(changes)}."
    console.print(each if changes else "No change that was tried makes it fit alone.")
    return {"largest": found, "what_fits": changes}
