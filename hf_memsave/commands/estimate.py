"""``memsave estimate``: whether a training step fits a GPU, from the configuration alone."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hf_memsave import MemSaveConfig, MemSaveError
from hf_memsave.commands import CommandError, check_folder, check_picture, positive_int
from hf_memsave.commands.options import DTYPES, NAMES, add_config, add_lora, quiet, weights_of
from hf_memsave.sizes import MIB, bytes_of

_OPTIMIZERS = ("adamw", "adamw_fused", "adamw_8bit", "adafactor", "sgd", "sgd_momentum")


def add_to(commands: Any) -> None:
    """Add this command to the subparsers of ``memsave``."""
    parser = commands.add_parser(
        "estimate",
        help="whether a training step fits a GPU, from the config alone: no weights, no GPU",
        description="Estimates the peak memory of a training step on a CUDA GPU, stock beside patched. A few layers "
        "run on a stand-in for a CUDA device, where every byte is counted; the full depth follows from them. "
        "Not modelled: fragmentation, and buffers of communication.",
    )
    add_config(parser)
    add = parser.add_argument
    add("--memsave", metavar="PRESET", default="exact", help="the preset to estimate beside stock (%(default)s)")
    add_step(parser)
    add("--memory", metavar="SIZE", help="what there is, such as 24GiB: says whether it fits, and what would")
    add("--check", action="store_true", help="run the step on this machine, on its GPU if it has one, and compare")
    add("--picture", type=Path, metavar="PNG", help="draw memory over the step, and where the kept bytes are")
    add("--html", type=Path, metavar="FILE", help="write a page with pictures and explanations, all in one file")
    add("--json", type=Path, metavar="FILE", help="write every figure, in bytes")
    parser.set_defaults(run=run)


def add_step(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a training step."""
    add = parser.add_argument
    add("--batch-size", type=positive_int, default=1, metavar="N", help="sequences on each device (%(default)s)")
    add("--seq-len", type=positive_int, default=2048, metavar="N", help="tokens in each (%(default)s)")
    add("--dtype", choices=sorted(DTYPES), help="of the weights (bf16; with --autocast fp32)")
    add("--autocast", choices=["bf16", "fp16"], help="compute in 16 bits with fp32 weights (Trainer's bf16=True)")
    add("--optimizer", choices=_OPTIMIZERS, default="adamw", help="(%(default)s)")
    add_lora(parser)
    add("--quantized", choices=["nf4"], help="with --lora, a base in 4 bits (QLoRA)")
    add("--checkpointing", action="store_true", help="with gradient checkpointing")
    add("--accumulation", type=positive_int, default=1, metavar="N", help="batches a step (%(default)s)")
    add("--attention", choices=["flash", "efficient", "cudnn", "eager"], default="flash", help="(%(default)s)")
    add("--padded", action="store_true", help="the batch comes with an attention mask")
    add("--holds-output", action="store_true", help="the loop holds the logits in backward (Trainer does not)")
    add("--devices", type=positive_int, default=1, metavar="N", help="how many GPUs train together (%(default)s)")
    add("--sharding", choices=["ddp", "zero1", "zero2", "fsdp"], default="ddp", help="over the GPUs (%(default)s)")
    add("--layers", type=positive_int, metavar="N", help="the depth, instead of the configuration's own")


def run(args: argparse.Namespace) -> int:
    """Estimate, print, and write what was asked for.

    Returns:
        0; 1 if it does not fit ``--memory``, or if ``--check`` finds another figure.

    Raises:
        CommandError: The options contradict each other, or the step cannot be run.
        MemSaveError: It cannot be estimated.
    """
    if args.check and args.devices > 1:
        raise CommandError(f"--check runs the step on one device, got --devices {args.devices}. Leave one out.")
    if args.json:
        check_folder(args.json)
    if args.picture:
        check_picture(args.picture)
    if args.html:
        check_picture(args.html, (".html", ".htm"))
    memsave = MemSaveConfig.named(args.memsave)

    from hf_memsave.measure.estimate import estimate
    from hf_memsave.measure.models import load_config

    quiet()
    memory = None if args.memory is None else bytes_of(args.memory)
    config = load_config(args.model)
    console = Console(highlight=False)
    training = step_of(args)
    options = {"devices": args.devices, "sharding": args.sharding, "layers": args.layers}
    with progress_bar(console, "Tracing a few layers") as tell:
        result = estimate(config, memsave=memsave, memory=memory, **training, **options, progress=tell)
    console.print(str(result), markup=False, soft_wrap=True)
    figures = result.to_dict()
    if memory is not None:
        figures["largest"] = _largest(config, result, training, memsave, memory, args, console)
    _draw(args, result, training, console)
    agrees = True
    if args.check:
        figures["check"], agrees = _check(config, result, training, memsave, console)
    if args.json:
        args.json.write_text(json.dumps({"model_or_config": args.model, **figures}, indent=2) + "\n", encoding="utf-8")
        console.print(f"Figures: {args.json}", markup=False)
    return int(result.fits is False or not agrees)


def _check(
    config: Any, result: Any, training: dict[str, Any], memsave: Any, console: Console
) -> tuple[dict[str, Any], bool]:
    """Run the step and print what it takes beside the prediction; the figures, and whether they agree."""
    from hf_memsave.measure.check import SLACK, check
    from hf_memsave.measure.estimate import WORKSPACES
    from hf_memsave.measure.training import Training

    try:
        with progress_bar(console, "Running the step") as tell:
            found = check(config, result, Training(**training), memsave, tell)
    except MemSaveError as error:
        raise CommandError(f"--check: {error}") from error
    device = next(iter(found.values())).device
    table = Table("", "predicted", "measured", "difference", box=box.SIMPLE_HEAD)
    for name, one in found.items():
        for what in SLACK[device]:
            figures = (f"{amount[what] / MIB:,.2f} MiB" for amount in (one.predicted, one.measured))
            table.add_row(f"{name}, {what}", *figures, f"{one.difference(what):+.2%}")
    console.print(_on(device, WORKSPACES), table, sep="\n")
    for name in {"stock", "patched" if result.patched else "stock"} - found.keys():
        console.print(f"{name}: not run, as it is too large for this machine.")
    allowed = ", ".join(f"{what} {slack:.0%}" for what, slack in SLACK[device].items())
    agrees = all(one.agrees for one in found.values())
    console.print(f"{'Within' if agrees else 'Not within'} what is allowed ({allowed}).")
    return {"device": device, **{name: dataclasses.asdict(one) for name, one in found.items()}}, agrees


def _on(device: str, workspaces: int) -> str:
    if device == "cuda":
        return (
            f"Check on {torch.cuda.get_device_name()}: peaks of PyTorch's allocator, of which cuBLAS takes "
            f"{workspaces / MIB:.1f} MiB. What CUDA takes outside of it is not measured."
        )
    return (
        "Check on the CPU, as there is no CUDA device here: few layers on the CPU predict what a step of all layers "
        "on the CPU takes. Its kernels keep other bytes than CUDA's, so these are not the figures above."
    )


def _draw(args: argparse.Namespace, result: Any, training: dict[str, Any], console: Console) -> None:
    """Write the picture and the page that were asked for."""
    if not (args.picture or args.html):
        return
    from hf_memsave.commands.estimate_page import draw, write_page

    path = Path(args.model).resolve()
    name = path.name if path.is_dir() else args.model
    if path.is_file():
        name = path.parent.name if path.name == "config.json" else path.stem
    settings = in_words(args, result, training)
    if args.picture:
        draw(args.picture, result, ", ".join([name, *settings.values()]))
        console.print(f"Picture: {args.picture}", markup=False)
    if args.html:
        write_page(args.html, result, name, settings)
        console.print(f"Page: {args.html}", markup=False)


def in_words(args: argparse.Namespace, result: Any, training: dict[str, Any]) -> dict[str, str]:
    """What was estimated, for people to read."""
    base = f", the frozen model in {args.quantized}" if args.quantized else ""
    words = {
        "model": f"{result.model}, {' + '.join(map(str, result.depth.values()))} layers",
        "batch": f"{args.batch_size} x {args.seq_len:,} tokens{', padded' if args.padded else ''}",
        "trained": f"LoRA: {args.lora}{base}" if args.lora else "all parameters",
        "weights": NAMES[training["dtype"]] + (f", computed in {args.autocast}" if args.autocast else ""),
        "optimizer": args.optimizer,
        "attention": args.attention,
        "patched": f"preset {args.memsave}",
    }
    more = {
        "loop": "holds the model's output" if args.holds_output else "",
        "checkpointing": "of every layer" if args.checkpointing else "",
        "accumulation": f"{args.accumulation} batches a step" if args.accumulation > 1 else "",
        "GPUs": f"{args.devices}, {args.sharding}; figures are of one" if args.devices > 1 else "",
    }
    return words | {name: text for name, text in more.items() if text}


def step_of(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of :class:`~hf_memsave.measure.training.Training`, as the options say.

    Returns:
        Name -> value.

    Raises:
        CommandError: They contradict each other.
    """
    dtype = weights_of(args, "16 bits") or torch.bfloat16
    if args.quantized and not args.lora:
        raise CommandError(
            f"--quantized {args.quantized} freezes the model, so adapters are what trains: expected --lora too. "
            "Add --lora r=8, or leave --quantized out."
        )
    names = ("batch_size", "seq_len", "optimizer", "lora", "quantized", "checkpointing", "accumulation", "attention",
             "padded", "holds_output")  # fmt: skip
    return {name: getattr(args, name) for name in names} | {
        "dtype": dtype,
        "autocast": DTYPES.get(args.autocast),
    }


def _largest(
    config: Any, result: Any, training: dict[str, Any], memsave: Any, memory: int, args: Any, console: Console
) -> dict[str, dict[str, int]]:
    """The largest batch and the longest sequence that fit, stock and patched; printed too."""
    from hf_memsave.measure.fit import largest
    from hf_memsave.measure.training import Training

    found: dict[str, dict[str, int]] = {"stock": {}, "patched": {}}
    with progress_bar(console, "Looking for what fits") as tell:
        searches = list(product(("batch_size", "seq_len"), (("stock", None), ("patched", memsave))))
        for done, (name, (label, chosen)) in enumerate(searches, start=1):
            found[label][name] = largest(
                config, result.depth, Training(**training), chosen, name, memory, (args.sharding, args.devices),
                getattr(result, label),
            )  # fmt: skip
            tell(done / len(searches))
    for label, numbers in found.items():
        console.print(
            f"{label}: the largest batch that fits is {numbers['batch_size']} (of {args.seq_len} tokens), the longest "
            f"sequence {numbers['seq_len']} (in batches of {args.batch_size}).",
            soft_wrap=True,
        )
    return found


@contextlib.contextmanager
def progress_bar(console: Console, title: str) -> Iterator[Callable[[float], None]]:
    """A bar that goes away when it is done.

    Yields:
        What is to be told the share that is done.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(title, total=1)
        yield lambda share: progress.update(bar, completed=share)
