"""``--lora r=16,dropout=0.05``: the adapters that a report adds to its model."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from hf_memsave.measure.lora import Lora


def parse_lora(text: str) -> Lora:
    """The type of the argument: ``key=value``, joined by commas."""
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
    lora = Lora(**given)
    if min(lora.r, lora.alpha) < 1 or not 0 <= lora.dropout < 1 or lora.dtype not in ("fp32", "model"):
        raise argparse.ArgumentTypeError(
            f"expected r and alpha from 1, dropout in [0, 1), dtype fp32 or model, got {text!r}"
        )
    if not all(lora.targets.split("+")):
        raise argparse.ArgumentTypeError(f"expected names joined by +, got targets={lora.targets!r}")
    return lora
