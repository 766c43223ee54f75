"""The model and the batch that a command runs a training step of, as its options name them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hf_memsave.commands import CommandError, positive_int
from hf_memsave.commands.options import DTYPES, quiet, weights_of
from hf_memsave.commands.shrunk import shrunk
from hf_memsave.measure.inputs import forward_of, make_batch, read_batch
from hf_memsave.measure.models import has_weights, load_config, load_model

_SEQUENCES, _TOKENS = 2, 64


@dataclass(frozen=True)
class Inputs:
    """A model in training mode, a batch on its device, what the weights are, and the dtype to compute in, if any."""

    model: Any
    batch: dict[str, Any]
    weights: str
    autocast: torch.dtype | None

    @property
    def forward(self) -> Callable[..., Any]:
        """The model's forward, under autocast where that was asked for."""
        return forward_of(self.model, self.autocast)


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`load_inputs` reads."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="the folder of a saved model or PEFT adapter, or a name on the hub; or, for random weights, a config.json "
        "or a model type (bert, llama, ...)",
    )
    parser.add_argument(
        "--batch", type=Path, metavar="FILE", help="tensors by name: torch.save, .safetensors, .json, .jsonl (examples)"
    )
    parser.add_argument("--batch-size", type=positive_int, metavar="N", help=f"random sequences ({_SEQUENCES})")
    parser.add_argument("--seq-len", type=positive_int, metavar="N", help=f"tokens in each ({_TOKENS})")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="of the weights (as saved; with --autocast fp32)")
    parser.add_argument("--autocast", choices=["bf16"], help="compute in bf16 with fp32 weights (Trainer's bf16=True)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to run (%(default)s)")


def load_inputs(args: argparse.Namespace, console: Console, *, may_shrink: bool = False) -> Inputs:
    """Load what the options name.

    Args:
        args: With the options of :func:`add_inputs`.
        console: Shows that it takes a while.
        may_shrink: Whether ``args.layers``, or fewer of a model that is too large, will do where weights are random.

    Returns:
        Model and batch.

    Raises:
        CommandError: The options contradict each other.
        MeasureError: Model or batch cannot be loaded.
    """
    dtype = weights_of(args)
    if args.batch and (args.batch_size or args.seq_len):
        raise CommandError("--batch brings its own sizes, got --batch-size or --seq-len as well. Leave one out.")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda: expected a CUDA device, found none. Use --device cpu.")
    quiet()
    batch = read_batch(args.batch) if args.batch else None  # a wrong file must not cost a download
    with console.status(f"Loading {args.model} ..."):
        config = None
        if may_shrink and not has_weights(args.model):
            whole = load_config(args.model)
            config, said = shrunk(args.model, whole, dtype or whole.dtype or torch.float32, args.layers)
            console.print(said, markup=False, end="\n" if said else "")
        elif may_shrink and args.layers:
            raise CommandError(f"--layers: expected random weights, got those of {args.model}. Leave it out.")
        model, head, weights = load_model(args.model, dtype, config=config)
        batch = batch or make_batch(head, model.config, args.batch_size or _SEQUENCES, args.seq_len or _TOKENS)
        model.to(args.device).train()
        batch = {name: value.to(args.device) for name, value in batch.items()}
    return Inputs(model, batch, weights, torch.bfloat16 if args.autocast else None)
