"""Values that follow from the options of several commands, and how each command prints and writes."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from transformers import PreTrainedConfig

from hf_memsave.commands.arguments import BATCH_SIZE, SEQ_LEN, STANDARD_OUTPUT
from hf_memsave.config.files import write
from hf_memsave.config.names import SHAPES
from hf_memsave.config.sizes import counted
from hf_memsave.measure.estimate import Estimate
from hf_memsave.measure.inputs import shapes
from hf_memsave.measure.models import build_empty, most_tokens, text_head
from hf_memsave.measure.training import DTYPES as DTYPES
from hf_memsave.measure.training import Training, check_positions

#: The remedy for a step that fails stock.
GIVE_ANOTHER_BATCH = "Give one with --batch, or lower --batch-size or --seq-len."


def weights_of(args: argparse.Namespace) -> torch.dtype | None:
    """Return the dtype that ``--dtype`` and ``--autocast`` give the weights; None where neither is given."""
    return torch.float32 if args.autocast else DTYPES.get(args.dtype)


def step_of(args: argparse.Namespace, *further: str) -> dict[str, Any]:
    """Return the fields of :class:`~hf_memsave.measure.training.Training` and the ``further`` options, as given."""
    dtypes = {"dtype": weights_of(args) or torch.bfloat16, "autocast": DTYPES.get(args.autocast)}
    names = [field.name for field in dataclasses.fields(Training) if field.name in args]
    return {name: getattr(args, name) for name in (*names, *further)} | dtypes


def step_in_words(args: argparse.Namespace, result: Estimate) -> str:
    """Describe the estimated step, such as "BertForMaskedLM, 12 layers, batch 2 x 512 tokens, bf16"."""
    depth = f"{counted(' + '.join(map(str, result.depth.values())), 'layer')}, " if result.depth else ""
    is_text = depth and not getattr(args, "batch", None)
    batch = f"{args.batch_size} x {counted(args.seq_len, 'token')}" if is_text else shapes(result.step.inputs)
    return f"{result.step.model}, {depth}batch {batch}, {_dtype_in_words(args)}"


def _dtype_in_words(args: argparse.Namespace) -> str:
    return f"{args.autocast} autocast, fp32 weights" if args.autocast else args.dtype or "bf16"


def setting_in_words(args: argparse.Namespace, step: str = "") -> str:
    """Describe a step with its optimizer and what it trains: "batch 2 x 512 tokens, bf16, adamw, all parameters"."""
    step = step or f"batch {args.batch_size} x {counted(args.seq_len, 'token')}, {_dtype_in_words(args)}"
    trained = f"LoRA ({args.lora})" if args.lora else "all parameters"
    return ", ".join([f"{name_of(args.model)}: {step}", args.optimizer, trained, *filter(None, [args.quantized])])


def name_of(model: str) -> str:
    """Return a model's name for people: a folder's own, also for its config.json; a file's without suffix."""
    path = Path(model).resolve()
    path = path.parent if path.name == "config.json" else path
    return path.stem if path.is_file() else path.name if path.is_dir() else model


def freed(stock: float, patched: float, words: str = "") -> str:
    """Format the share of stock's bytes that is freed, with ``words`` after it."""
    return "more" if patched > stock else f"{1 - patched / max(stock, 1):.0%}" + words


class _Console(Console):
    def on_broken_pipe(self) -> None:  # rich would end the process with status 1, as if a check had failed
        raise


def console_of(args: argparse.Namespace, **options: Any) -> Console:
    """Return the console to print to: standard output, or standard error where ``--json -`` takes the former."""
    is_taken = getattr(args, "json", None) == STANDARD_OUTPUT
    console = _Console(highlight=False, markup=False, stderr=is_taken, **options)
    if not console.is_terminal:
        transformers.logging.disable_progress_bar()
        console.width = 10_000  # no line of a file is cut or wrapped
    return console


def settle_sizes(args: argparse.Namespace, config: PreTrainedConfig) -> str:
    """Set the batch size and length that were not given; return lines on these; MeasureError for too long a length."""
    most, given, name = most_tokens(config), args.seq_len, name_of(args.model)
    args.batch_size, args.seq_len = args.batch_size or BATCH_SIZE, given or min(SEQ_LEN, most)
    known = f"{name}: sizes known to hf_memsave, without the hub.\n" if config.name_or_path == SHAPES else ""
    if is_more := args.seq_len > most and text_head(config) is not None:
        check_positions(build_empty(config), args.seq_len)
    elif given or args.seq_len >= SEQ_LEN:
        return known
    words = f"more than the {most:,} positions that {name} was made for" if is_more else f"as many as {name} takes"
    return f"{known}{counted(args.seq_len, 'token')}: {words}.\n"


def write_figures(path: Path | None, figures: dict[str, Any], console: Console) -> None:
    """Write the figures as JSON where ``--json`` asks for it, and print the name of the file."""
    text = json.dumps(figures, indent=2, default=dataclasses.asdict)
    if path == STANDARD_OUTPUT:
        print(text)
    elif path is not None:
        write(path, f"{text}\n")
        console.print(f"Figures: {path}")
