"""Options that several commands have, and what follows from them."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from hf_memsave.errors import MeasureError, MemSaveError
from hf_memsave.measure.lora import Lora

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: What to do about a step that fails stock.
GIVE_ANOTHER_BATCH = "Give one with --batch, or lower --batch-size or --seq-len."


class CommandError(MemSaveError):
    """A command that cannot do what it was asked to."""


def quiet() -> None:
    """Hide what Transformers and the hub's client tell on the way, such as retries: the last one raises."""
    transformers.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def positive_int(text: str) -> int:
    """An argument's type: a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return int(text)


def _lora(text: str) -> Lora:
    """The type of ``--lora``: ``key=value``, joined by commas."""
    defaults = asdict(Lora())
    given: dict[str, Any] = {}
    for pair in text.split(","):
        key, _, value = pair.partition("=")
        if key not in defaults or not value or key in given:
            expected = ",".join(f"{k}=..." for k in defaults)
            raise argparse.ArgumentTypeError(f"expected {expected}, each once, got {pair!r}")
        try:
            given[key] = {"true": True, "false": False}[value] if key == "dora" else type(defaults[key])(value)
        except (KeyError, ValueError) as error:
            expected = "dora=true or dora=false" if key == "dora" else f"a number for {key}"
            raise argparse.ArgumentTypeError(f"expected {expected}, got {value!r}") from error
    if not all(given.get("targets", "all-linear").split("+")):
        raise argparse.ArgumentTypeError(f"expected names joined by +, got targets={given['targets']!r}")
    try:
        return Lora(**given)
    except MeasureError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


NUMBER: dict[str, Any] = {"type": positive_int, "metavar": "N"}
FILE: dict[str, Any] = {"type": Path, "metavar": "FILE"}
#: Option -> what argparse is told of it.
_SHARED: dict[str, dict[str, Any]] = {
    "model": {
        "metavar": "MODEL_OR_CONFIG",
        "help": "a folder with config.json, such a file, a model type (bert, llama, ...: its defaults), a name on the "
        "hub",
    },
    "--memsave": {"metavar": "PRESET", "default": "exact", "help": "a preset or YAML file (%(default)s)"},
    "--batch-size": {**NUMBER, "help": "sequences on each device (%(default)s)"},
    "--seq-len": {**NUMBER, "help": "tokens in each (%(default)s)"},
    "--dtype": {"choices": sorted(DTYPES), "help": "of the weights (bf16; with --autocast fp32)"},
    "--autocast": {"choices": ["bf16"], "help": "compute in bf16 with fp32 weights (Trainer's bf16=True)"},
    "--lora": {
        "type": _lora,
        "metavar": "r=16,dropout=0.05",
        "help": "train LoRA adapters instead of the model; further keys: alpha, targets=q_proj+v_proj (all-linear), "
        "dtype=fp32|model (fp32, PEFT's default), dora=true",
    },
    "--layers": {**NUMBER, "help": "the depth, instead of the configuration's own"},
    "--json": {**FILE, "help": "write every figure, in bytes"},
    "--out": {**FILE, "help": "write the configuration, as YAML or .json"},
}


def add(parser: argparse.ArgumentParser, *names: str, **changes: Any) -> None:
    """Add options by name; ``changes`` are to all of them."""
    for name in names:
        parser.add_argument(name, **_SHARED[name] | changes)


def weights_of(args: argparse.Namespace) -> torch.dtype | None:
    """The dtype that ``--dtype`` and ``--autocast`` give the weights; None where neither is given."""
    if args.autocast and args.dtype not in (None, "fp32"):
        raise CommandError(
            f"--autocast {args.autocast} computes in {args.autocast} with fp32 weights, got --dtype {args.dtype}. "
            "Leave one out."
        )
    return torch.float32 if args.autocast else DTYPES.get(args.dtype)


def name_of(model: str) -> str:
    """A model's name for people: of a folder, or of the folder of a config.json, its own."""
    path = Path(model).resolve()
    if path.is_file():
        return path.parent.name if path.name == "config.json" else path.stem
    return path.name if path.is_dir() else model


def write_figures(path: Path | None, figures: dict[str, Any], console: Console) -> None:
    """Write and name what ``--json`` asks for, if it does."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        console.print(f"Figures: {path}")


def check_picture(path: Path, suffixes: tuple[str, ...] = (".png", ".pdf", ".svg")) -> None:
    """Refuse, before the work that it would show, a picture or a page with pictures that cannot be written."""
    for library in ("matplotlib", "jinja2"):
        if find_spec(library) is None:
            needs = f"{path}: pictures need {library}, which is missing."
            raise CommandError(f"{needs} Run: pip install 'hf_memsave[plot]'")
    if path.suffix not in suffixes:
        raise CommandError(f"{path}: expected a name that ends in {' or '.join(suffixes)}. Rename the file.")
    check_folder(path)


def check_folder(path: Path | None) -> None:
    """Refuse a file in a folder that does not exist."""
    if path is not None and (not path.parent.is_dir() or path.is_dir()):
        raise CommandError(f"{path}: expected a file in a folder that exists. Create the folder, or name another file.")


@contextlib.contextmanager
def progress_bar(console: Console, title: str) -> Iterator[Callable[[float], None]]:
    """Show a bar that goes away when it is done, and give a function that is told the share that is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(title, total=1)
        yield lambda share: progress.update(bar, completed=share)
