"""``memsave verify``: one training step of your own model and batch, stock and patched, compared to the bit."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table

from hf_memsave import MemSaveConfig
from hf_memsave.commands import CommandError, positive_int
from hf_memsave.commands.step import (
    HALF_TOLERANCE,
    TOLERANCE,
    Difference,
    PatchedStepError,
    StepComparison,
    compare_step,
    described,
)

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_SEQUENCES, _TOKENS = 2, 64
_WORST = 5
_MIB = 2**20


def add_to(commands: Any) -> None:
    """Add this command to the subparsers of ``memsave``."""
    parser = commands.add_parser(
        "verify",
        help="one training step of your model and batch, stock and patched, compared to the bit",
        description="Runs one forward and backward of a model, stock and patched, from the same seed, and compares the "
        "loss, every gradient and the bytes kept in between. Exit status 0 if they are equal: to the bit, or on CUDA, "
        f"whose kernels add in no fixed order, to a relative L2 distance of {TOLERANCE:g} ({HALF_TOLERANCE:g} with "
        "16-bit numbers). 1 if they differ, 2 if the step cannot be run.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="the folder of a saved model or PEFT adapter, or a name on the hub; or, for random weights, a config.json "
        "or a model type (bert, llama, ...)",
    )
    parser.add_argument(
        "--batch", type=Path, metavar="FILE", help="tensors by name: torch.save, .safetensors, .json, .jsonl (examples)"
    )
    parser.add_argument("--memsave", metavar="PRESET", default="exact", help="the preset to verify (%(default)s)")
    parser.add_argument("--batch-size", type=positive_int, metavar="N", help=f"random sequences ({_SEQUENCES})")
    parser.add_argument("--seq-len", type=positive_int, metavar="N", help=f"tokens in each ({_TOKENS})")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), help="of the weights (as saved; with --autocast fp32)")
    parser.add_argument("--autocast", choices=["bf16"], help="compute in bf16 with fp32 weights (Trainer's bf16=True)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to run (%(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load, compare and print.

    Returns:
        0, or 1 if the patched step fails, or differs by more than allowed.

    Raises:
        CommandError: The options contradict each other, or the stock step cannot be run.
    """
    memsave = MemSaveConfig.preset(args.memsave)
    if args.autocast and args.dtype not in (None, "fp32"):
        raise CommandError(
            f"--autocast {args.autocast} computes in bf16 with fp32 weights, got --dtype {args.dtype}. Leave one out."
        )
    if args.batch and (args.batch_size or args.seq_len):
        raise CommandError("--batch brings its own sizes, got --batch-size or --seq-len as well. Leave one out.")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda: expected a CUDA device, found none. Use --device cpu.")
    from hf_memsave.commands.models import make_batch
    from hf_memsave.commands.saved import load_model, read_batch

    transformers.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; the last one raises
    batch = read_batch(args.batch) if args.batch else None  # a wrong file must not cost a download
    console = Console(highlight=False)
    with console.status(f"Loading {args.model} ..."):
        dtype = _DTYPES["fp32"] if args.autocast else _DTYPES.get(args.dtype)
        model, head, weights = load_model(args.model, dtype)
        batch = batch or make_batch(head, model.config, args.batch_size or _SEQUENCES, args.seq_len or _TOKENS)
        model.to(args.device).train()
        batch = {name: value.to(args.device) for name, value in batch.items()}
    try:
        with console.status("Running three steps ..."):
            found = compare_step(model, batch, memsave, autocast=torch.bfloat16 if args.autocast else None)
    except PatchedStepError as error:
        print(f"memsave verify: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    context = [f"preset {args.memsave}", args.device, *(["bf16 autocast"] if args.autocast else [])]
    console.print(f"{type(model).__name__}, {weights}: {described(batch)}", style="bold", markup=False)
    console.print(", ".join(context), *_tables(found), _verdict(found), sep="\n")
    if found.differing:
        print(f"memsave verify: {_causes(found)}", file=sys.stderr)
    return int(bool(found.differing))


def _tables(found: StepComparison) -> list[Table]:
    table = Table("", "stock", "patched", "", box=box.SIMPLE_HEAD)
    table.add_row("loss", *(f"{loss:.7g}" for loss in found.losses), _distance(found.loss))
    equal, count = sum(d.equal for d in found.gradients), len(found.gradients)
    table.add_row("gradients", "", "", f"{equal} of {count} equal to the bit")
    kept = [f"{kept.total / _MIB:,.2f}" for kept in (found.stock, found.patched)]
    table.add_row("kept MiB", *kept, f"{found.stock.total / max(found.patched.total, 1):.2f}x less")
    if equal == count:
        return [table]
    worst = Table("worst gradients", "relative L2 distance", box=box.SIMPLE_HEAD)
    for d in sorted((d for d in found.gradients if not d.equal), key=lambda d: -d.relative)[:_WORST]:
        worst.add_row(d.name, _distance(d))
    return [table, worst]


def _verdict(found: StepComparison) -> str:
    if all(d.equal for d in (found.loss, *found.gradients)):
        return f"Equal to the last bit: the loss and all {len(found.gradients)} gradients."
    if found.differing:
        gradients = [d for d in found.differing if d is not found.loss]
        loss = "" if found.loss not in found.differing else " and the loss"
        return f"Different: {len(gradients)} of {len(found.gradients)} gradients{loss}."
    return (
        f"Equal within {found.tolerance:g}, the tolerance on this device: its kernels add in no fixed order (stock run "
        f"twice differs from itself by up to {found.repeat:.1e})."
    )


def _causes(found: StepComparison) -> str:
    expected = f"at most {found.tolerance:g}" if found.tolerance else "equal bits"
    worst = found.differing[0]
    return (
        f"{worst.name} differs by {worst.relative:.1e}; expected {expected}. Look first for code in the model that, "
        "between forward and backward, writes to an activation through .data or NumPy: nothing can see that, and what "
        "is computed again from that activation is then wrong. Write in place without .data, or to a copy. Under "
        "autocast, bits may also differ where the README says so (What is exact). Otherwise please report this, with "
        "the versions that `memsave doctor` prints."
    )


def _distance(difference: Difference) -> str:
    return "equal to the bit" if difference.equal else f"{difference.relative:.1e}"
