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

from hf_memsave.config.sizes import bytes_of
from hf_memsave.errors import MemSaveError
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


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return int(text)


def _lora(text: str) -> Lora:
    """Adapters from ``key=value`` pairs, joined by commas."""
    defaults = asdict(Lora())
    given: dict[str, Any] = {}
    for pair in text.split(","):
        key, _, value = pair.partition("=")
        if key not in defaults or not all(value.split("+")) or key in given:
            keys = ",".join(f"{k}=..." for k in defaults)
            raise CommandError(f"--lora: expected {keys}, each once, got {pair!r}. Correct that.")
        try:
            given[key] = {"true": True, "false": False}[value] if key == "dora" else type(defaults[key])(value)
        except (KeyError, ValueError) as error:
            expected = "dora=true or dora=false" if key == "dora" else f"a number for {key}"
            raise CommandError(f"--lora: expected {expected}, got {value!r}. Correct that.") from error
    return Lora(**given)


def output(text: str, *suffixes: str) -> Path:
    """The type of a file to write: refused, before the work that it is to show, in a folder that does not exist."""
    path = Path(text)
    if suffixes and path.suffix not in suffixes:
        raise CommandError(f"{path}: expected a name that ends in {' or '.join(suffixes)}. Rename the file.")
    if not path.parent.is_dir() or path.is_dir():
        raise CommandError(f"{path}: expected a file in a folder that exists. Create the folder, or name another file.")
    return path


def picture(text: str, *suffixes: str) -> Path:
    """The type of a picture, or of a page with pictures."""
    for name in ("matplotlib", "jinja2"):
        if find_spec(name) is None:
            raise CommandError(f"{text}: pictures need {name}, which is missing. Run: pip install 'hf_memsave[plot]'")
    return output(text, *(suffixes or (".png", ".pdf", ".svg")))


NUMBER: dict[str, Any] = {"type": _positive_int, "metavar": "N"}
SIZE: dict[str, Any] = {"type": bytes_of, "metavar": "SIZE"}
PICTURE: dict[str, Any] = {"type": picture, "metavar": "PNG"}
#: Option -> what argparse is told of it.
_SHARED: dict[str, dict[str, Any]] = {
    "model": {
        "metavar": "MODEL_OR_CONFIG",
        "help": "a folder with config.json, such a file, a model type (bert: its defaults), a name on the hub",
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
    "--json": {"type": output, "metavar": "FILE", "help": "write every figure, in bytes"},
    "--out": {"type": output, "metavar": "FILE", "help": "write the configuration, as YAML or .json"},
}


def add(parser: argparse.ArgumentParser, *names: str, **changes: Any) -> None:
    """Add options by name; ``changes`` are to all of them."""
    for name in names:
        parser.add_argument(name, **_SHARED[name] | changes)


def weights_of(args: argparse.Namespace) -> torch.dtype | None:
    """The dtype that ``--dtype`` and ``--autocast`` give the weights; None where neither is given."""
    if args.autocast and args.dtype not in (None, "fp32"):
        raise CommandError(f"--autocast computes with fp32 weights, got --dtype {args.dtype}. Leave one out.")
    return torch.float32 if args.autocast else DTYPES.get(args.dtype)


def name_of(model: str) -> str:
    """A model's name for people: of a folder, or of the folder of a config.json, its own."""
    path = Path(model).resolve()
    path = path.parent if path.name == "config.json" else path
    return path.stem if path.is_file() else path.name if path.is_dir() else model


def write_figures(path: Path | None, figures: dict[str, Any], console: Console) -> None:
    """Write and name what ``--json`` asks for, if it does."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        console.print(f"Figures: {path}")


@contextlib.contextmanager
def progress_bar(console: Console, title: str) -> Iterator[Callable[[float], None]]:
    """Show a bar that goes away when it is done, and give a function that is told the share that is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(title, total=1)
        yield lambda share: progress.update(bar, completed=share)
