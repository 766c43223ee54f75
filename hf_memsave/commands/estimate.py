"""``memsave estimate``: whether a training step fits a GPU, from the configuration alone."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from hf_memsave.commands import options
from hf_memsave.commands.arguments import memsave_in_words, memsave_of
from hf_memsave.config.config import MemSaveConfig
from hf_memsave.config.sizes import counted, gib
from hf_memsave.errors import CommandError, MemSaveError
from hf_memsave.measure.estimate import Estimate, estimate
from hf_memsave.measure.largest import largest
from hf_memsave.measure.models import at_depth, load_config
from hf_memsave.measure.training import Training


def run(args: argparse.Namespace) -> int:
    """Estimate, print, and write; returns 0, or 1 if it does not fit, or if ``--check`` finds another figure."""
    if args.check and not torch.cuda.is_available():
        raise CommandError("--check: expected a CUDA device to run the step on, found none. Leave it out.")
    memsave, config, console = memsave_of(args), load_config(args.model), options.console_of(args, soft_wrap=True)
    note = options.settle_sizes(args, config)
    step = step_of(args)
    rest = {name: getattr(args, name) for name in ("memory", "devices", "sharding", "layers")}
    with console.status("Tracing a few layers ..."):
        result = estimate(config, memsave=memsave, **step, **rest)
    console.print(f"{note}{result}")
    figures = {"model_or_config": args.model, **result.to_dict()}
    training = Training(**step)
    if args.memory:
        figures |= _within(config, result, step, memsave, args, console)
    if args.html:
        from hf_memsave.commands.estimate_page import write_page

        settings = in_words(args, result, training)
        write_page(args.html, result, options.name_of(args.model), settings, figures.get("what_fits", ()))
        console.print(f"Page: {args.html}")
    agrees = True
    if args.check:
        figures["check"], agrees = _check(config, result, training, memsave, console)
    options.write_figures(args.json, figures, console)
    return int(result.fits is False or not agrees)


def step_of(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of :class:`~hf_memsave.measure.training.Training`, as the options say."""
    dtypes = {"dtype": options.weights_of(args) or torch.bfloat16, "autocast": options.DTYPES.get(args.autocast)}
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(Training)} | dtypes


def _check(
    config: Any, result: Estimate, training: Training, memsave: MemSaveConfig, console: Console
) -> tuple[dict[str, Any], bool]:
    """Run the step and print what it takes beside the prediction; the figures, and whether they agree."""
    from hf_memsave.measure.check import SLACK, check

    try:
        with console.status("Running the step ..."):
            found = check(config, result, training, memsave)
    except MemSaveError as error:
        raise CommandError(f"--check: {error.on_command_line}") from error
    table = Table("", "predicted", "measured", "difference", box=box.SIMPLE_HEAD)
    for name, one in found.items():
        for what in SLACK:
            figures = (gib(amount[what]) for amount in (one.predicted, one.measured))
            table.add_row(f"{name}, {what}", *figures, f"{one.difference(what):+.2%}")
    how = f"Check on {torch.cuda.get_device_name()}: what PyTorch's allocator gives out, but for cuBLAS's work spaces."
    console.print(how, table, sep="\n")
    for name in {"stock", "patched"} - found.keys():
        console.print(f"{name}: not run, as it is too large for this machine.")
    allowed = ", ".join(f"{what} {slack:.0%}" for what, slack in SLACK.items())
    agrees = all(one.agrees for one in found.values())
    console.print(f"{'Within' if agrees else 'Not within'} what is allowed ({allowed}).")
    return {name: dataclasses.asdict(one) for name, one in found.items()}, agrees


def in_words(args: argparse.Namespace, result: Estimate, training: Training) -> dict[str, str]:
    """What was estimated, for people to read."""
    base = f", the frozen model in {args.quantized}" if args.quantized else ""
    words = {
        "model": f"{result.model}, {counted(' + '.join(map(str, result.depth.values())), 'layer')}",
        "batch": f"{args.batch_size} x {counted(args.seq_len, 'token')}{', padded' if args.padded else ''}",
        "trained": f"LoRA: {args.lora}{base}" if args.lora else "all parameters",
        "weights": options.NAMES[training.dtype] + (f", computed in {args.autocast}" if args.autocast else ""),
        "optimizer": args.optimizer,
        "attention": args.attention,
        "patched": f"preset {memsave_in_words(args)}",
        "loop": "holds the model's output" if args.holds_output else "",
        "checkpointing": "of every layer" if args.checkpointing else "",
        "accumulation": f"{args.accumulation} batches a step" if args.accumulation > 1 else "",
        "GPUs": f"{args.devices}, {args.sharding}; figures are of one" if args.devices > 1 else "",
    }
    return {name: text for name, text in words.items() if text}


def _within(
    config: Any, result: Estimate, step: dict[str, Any], memsave: MemSaveConfig, args: argparse.Namespace,
    console: Console,
) -> dict[str, Any]:  # fmt: skip
    """The "largest" batch and sequence that fit, and "what_fits" where the step itself does not; printed too."""
    found, shards = {}, (args.sharding, args.devices)
    with console.status("Looking for what fits ..."):
        for label, chosen in (("stock", None), ("patched", memsave)):
            batch, tokens = (
                largest(config, result.depth, Training(**step), chosen, name, args.memory, shards)
                for name in ("batch_size", "seq_len")
            )
            found[label] = {"batch_size": batch, "seq_len": tokens}
            told = f"the largest batch that fits is {batch} (of {args.seq_len} tokens), the longest sequence {tokens} "
            told += f"(in batches of {args.batch_size})"
            console.print(f"{label}: {told if batch or tokens else 'no batch fits, not even of 8 tokens'}.")
    if result.fits:
        return {"largest": found}
    from hf_memsave.planner.plan import what_fits

    sharding, devices = shards
    with console.status("Looking for what makes it fit ..."):
        step |= {"budget": args.memory, "devices": devices, "sharding": sharding}
        changes = what_fits(at_depth(config, result.depth), memsave=memsave, **step)
    each = f"Each of these alone makes it fit, patched: {'; '.join(changes)}."
    console.print(each if changes else "No other change alone makes it fit.")
    return {"largest": found, "what_fits": changes}
