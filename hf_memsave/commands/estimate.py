"""``memsave estimate``: whether a training step fits a GPU, from the configuration alone."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from hf_memsave import MemSaveConfig, MemSaveError
from hf_memsave.commands import options
from hf_memsave.config.sizes import MIB
from hf_memsave.measure.estimate import WORKSPACES, Estimate, estimate, largest
from hf_memsave.measure.models import load_config
from hf_memsave.measure.training import OPTIMIZERS, Training


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.description = (
        "Estimates the peak memory of a training step on a CUDA GPU, stock beside patched. A few layers run on a "
        "stand-in for a CUDA device, where every byte is counted; the full depth follows from them. Not modelled: "
        "fragmentation, and buffers of communication."
    )
    options.add(parser, "model")
    options.add(parser, "--memsave", help="the preset to estimate beside stock (%(default)s)")
    add_step(parser)
    option = parser.add_argument
    option("--memory", **options.SIZE, help="what there is, such as 24GiB: says whether it fits, and what would")
    option("--check", action="store_true", help="run the step on this machine, on its GPU if it has one, and compare")
    option("--picture", **options.PICTURE, help="draw memory over the step, and where the kept bytes are")
    page: dict[str, Any] = {"type": lambda text: options.picture(text, ".html", ".htm"), "metavar": "FILE"}
    option("--html", **page, help="write a page with pictures and explanations, all in one file")
    options.add(parser, "--json")


def add_step(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a training step."""
    option = parser.add_argument
    options.add(parser, "--batch-size", default=1)
    options.add(parser, "--seq-len", default=2048)
    options.add(parser, "--dtype")
    in_16_bits = "compute in 16 bits with fp32 weights (Trainer's bf16=True)"
    options.add(parser, "--autocast", choices=["bf16", "fp16"], help=in_16_bits)
    option("--optimizer", choices=list(OPTIMIZERS), default="adamw", help="(%(default)s)")
    options.add(parser, "--lora")
    option("--quantized", choices=["nf4"], help="with --lora, a base in 4 bits (QLoRA)")
    option("--checkpointing", action="store_true", help="with gradient checkpointing")
    option("--accumulation", **options.NUMBER, default=1, help="batches a step (%(default)s)")
    option("--attention", choices=["flash", "efficient", "cudnn", "eager"], default="flash", help="(%(default)s)")
    option("--padded", action="store_true", help="the batch comes with an attention mask")
    option("--holds-output", action="store_true", help="the loop holds the logits in backward (Trainer does not)")
    option("--devices", **options.NUMBER, default=1, help="how many GPUs train together (%(default)s)")
    option("--sharding", choices=["ddp", "zero1", "zero2", "fsdp"], default="ddp", help="over the GPUs (%(default)s)")
    options.add(parser, "--layers")


def run(args: argparse.Namespace) -> int:
    """Estimate, print, and write; returns 0, or 1 if it does not fit, or if ``--check`` finds another figure."""
    if args.check and args.devices > 1:
        raise options.CommandError(f"--check runs the step on one device, got --devices {args.devices}. Leave one out.")
    memsave = MemSaveConfig.named(args.memsave)
    config = load_config(args.model)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    step = step_of(args)
    rest = {name: getattr(args, name) for name in ("memory", "devices", "sharding", "layers")}
    with options.progress_bar(console, "Tracing a few layers") as tell:
        result = estimate(config, memsave=memsave, **step, **rest, progress=tell)
    console.print(str(result))
    figures = {"model_or_config": args.model, **result.to_dict()}
    training = Training(**step)
    if args.memory:
        figures["largest"] = _largest(config, result, training, memsave, args, console)
    if args.picture or args.html:
        from hf_memsave.commands.estimate_page import draw, write_page

        name, settings = options.name_of(args.model), in_words(args, result, training)
        if args.picture:
            draw(args.picture, result, ", ".join([name, *settings.values()]))
            console.print(f"Picture: {args.picture}")
        if args.html:
            write_page(args.html, result, name, settings)
            console.print(f"Page: {args.html}")
    agrees = True
    if args.check:
        figures["check"], agrees = _check(config, result, training, memsave, console)
    options.write_figures(args.json, figures, console)
    return int(result.fits is False or not agrees)


def step_of(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of :class:`~hf_memsave.measure.training.Training`, as the options say."""
    dtypes = {"dtype": options.weights_of(args) or torch.bfloat16, "autocast": options.DTYPES.get(args.autocast)}
    if args.quantized and not args.lora:
        raise options.CommandError("--quantized freezes the model: expected --lora. Add --lora r=8, or leave it out.")
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(Training)} | dtypes


def _check(
    config: Any, result: Estimate, training: Training, memsave: MemSaveConfig, console: Console
) -> tuple[dict[str, Any], bool]:
    """Run the step and print what it takes beside the prediction; the figures, and whether they agree."""
    from hf_memsave.measure.check import SLACK, check

    try:
        with options.progress_bar(console, "Running the step") as tell:
            found = check(config, result, training, memsave, tell)
    except MemSaveError as error:
        raise options.CommandError(f"--check: {error}") from error
    device = next(iter(found.values())).device
    table = Table("", "predicted", "measured", "difference", box=box.SIMPLE_HEAD)
    for name, one in found.items():
        for what in SLACK[device]:
            figures = (f"{amount[what] / MIB:,.2f} MiB" for amount in (one.predicted, one.measured))
            table.add_row(f"{name}, {what}", *figures, f"{one.difference(what):+.2%}")
    how = (
        "Check on the CPU, as there is no CUDA device here: few layers on the CPU predict what a step of all layers on "
        "the CPU takes. Its kernels keep other bytes than CUDA's, so these are not the figures above."
    )
    if device == "cuda":
        how = f"Check on {torch.cuda.get_device_name()}: peaks of PyTorch's allocator, of which cuBLAS takes "
        how += f"{WORKSPACES / MIB:.1f} MiB. What CUDA takes outside of it is not measured."
    console.print(how, table, sep="\n")
    for name in {"stock", "patched"} - found.keys():
        console.print(f"{name}: not run, as it is too large for this machine.")
    allowed = ", ".join(f"{what} {slack:.0%}" for what, slack in SLACK[device].items())
    agrees = all(one.agrees for one in found.values())
    console.print(f"{'Within' if agrees else 'Not within'} what is allowed ({allowed}).")
    return {"device": device, **{name: dataclasses.asdict(one) for name, one in found.items()}}, agrees


def in_words(args: argparse.Namespace, result: Estimate, training: Training) -> dict[str, str]:
    """What was estimated, for people to read."""
    base = f", the frozen model in {args.quantized}" if args.quantized else ""
    words = {
        "model": f"{result.model}, {' + '.join(map(str, result.depth.values()))} layers",
        "batch": f"{args.batch_size} x {args.seq_len:,} tokens{', padded' if args.padded else ''}",
        "trained": f"LoRA: {args.lora}{base}" if args.lora else "all parameters",
        "weights": options.NAMES[training.dtype] + (f", computed in {args.autocast}" if args.autocast else ""),
        "optimizer": args.optimizer,
        "attention": args.attention,
        "patched": f"preset {args.memsave}",
        "loop": "holds the model's output" if args.holds_output else "",
        "checkpointing": "of every layer" if args.checkpointing else "",
        "accumulation": f"{args.accumulation} batches a step" if args.accumulation > 1 else "",
        "GPUs": f"{args.devices}, {args.sharding}; figures are of one" if args.devices > 1 else "",
    }
    return {name: text for name, text in words.items() if text}


def _largest(
    config: Any, result: Estimate, training: Training, memsave: MemSaveConfig, args: argparse.Namespace,
    console: Console,
) -> dict[str, dict[str, int]]:  # fmt: skip
    """The largest batch and the longest sequence that fit, stock and patched; printed too."""
    found = {}
    shards = (args.sharding, args.devices)
    with options.progress_bar(console, "Looking for what fits") as tell:
        for label, chosen in (("stock", None), ("patched", memsave)):
            batch, tokens = (
                largest(config, result.depth, training, chosen, name, args.memory, shards, getattr(result, label))
                for name in ("batch_size", "seq_len")
            )
            found[label] = {"batch_size": batch, "seq_len": tokens}
            tell(len(found) / 2)
            console.print(
                f"{label}: the largest batch that fits is {batch} (of {args.seq_len} tokens), the longest sequence "
                f"{tokens} (in batches of {args.batch_size})."
            )
    return found
