"""Options that several commands have, and what follows from them."""

from __future__ import annotations

import argparse
import logging
from dataclasses import asdict
from typing import Any

import torch
import transformers

from hf_memsave.commands import CommandError
from hf_memsave.errors import MeasureError
from hf_memsave.measure.lora import Lora

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def quiet() -> None:
    """Leave what Transformers and the hub's client tell on the way, such as retries: the last one raises."""
    transformers.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the model of which the configuration is read."""
    parser.add_argument(
        "model",
        metavar="MODEL_OR_CONFIG",
        help="a folder with config.json, such a file, a model type (bert, llama, ...: its defaults), a name on the hub",
    )


def add_lora(parser: argparse.ArgumentParser) -> None:
    """Add ``--lora``."""
    parser.add_argument(
        "--lora",
        type=_lora,
        metavar="r=16,dropout=0.05",
        help="train LoRA adapters instead of the model; further keys: alpha, targets=q_proj+v_proj (all-linear), "
        "dtype=fp32|model (fp32, PEFT's default), dora=true",
    )


def weights_of(args: argparse.Namespace, computed_in: str = "bf16") -> torch.dtype | None:
    """The dtype that ``--dtype`` and ``--autocast`` give the weights; errors say that it computes in ``computed_in``.

    Returns:
        None where neither is given.

    Raises:
        CommandError: They contradict each other.
    """
    if args.autocast and args.dtype not in (None, "fp32"):
        raise CommandError(
            f"--autocast {args.autocast} computes in {computed_in} with fp32 weights, got --dtype {args.dtype}. Leave "
            "one out."
        )
    return torch.float32 if args.autocast else DTYPES.get(args.dtype)


def _lora(text: str) -> Lora:
    """The type of ``--lora``: ``key=value``, joined by commas."""
    defaults = asdict(Lora())
    given: dict[str, Any] = {}
    for pair in text.split(","):
        key, _, value = pair.partition("=")
        if key not in defaults or not value or key in given:
            raise argparse.ArgumentTypeError(
                f"expected {','.join(f'{k}=...' for k in defaults)}, each once, got {pair!r}"
            )
        try:
            given[key] = {"true": True, "false": False}[value] if key == "dora" else type(defaults[key])(value)
        except KeyError as error:
            raise argparse.ArgumentTypeError(f"expected dora=true or dora=false, got {value!r}") from error
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"expected a number for {key}, got {value!r}") from error
    try:
        lora = Lora(**given)
    except MeasureError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not all(lora.targets.split("+")):
        raise argparse.ArgumentTypeError(f"expected names joined by +, got targets={lora.targets!r}")
    return lora
