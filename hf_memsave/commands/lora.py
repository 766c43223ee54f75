"""``--lora r=16,dropout=0.05``: the adapters that a report adds to its model."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_memsave.commands import CommandError


@dataclass(frozen=True)
class Lora:
    """PEFT's LoRA, by the short names of the command line.

    Attributes:
        r: The rank.
        alpha: ``lora_alpha``.
        dropout: ``lora_dropout``.
        targets: Names of modules, joined by "+".
        dtype: That of the adapters: fp32, PEFT's default, or the model's own.
        dora: With DoRA's magnitudes.
    """

    r: int = 8
    alpha: int = 16
    dropout: float = 0.0
    targets: str = "all-linear"
    dtype: str = "fp32"
    dora: bool = False

    @classmethod
    def parse(cls, text: str) -> Lora:
        """The type of the argument: ``key=value``, joined by commas."""
        defaults = asdict(cls())
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
        lora = cls(**given)
        if min(lora.r, lora.alpha) < 1 or not 0 <= lora.dropout < 1 or lora.dtype not in ("fp32", "model"):
            raise argparse.ArgumentTypeError(
                f"expected r and alpha from 1, dropout in [0, 1), dtype fp32 or model, got {text!r}"
            )
        if not all(lora.targets.split("+")):
            raise argparse.ArgumentTypeError(f"expected names joined by +, got targets={lora.targets!r}")
        return lora

    def add_to(self, model: PreTrainedModel) -> None:
        """Freeze the model and put adapters into it.

        Raises:
            CommandError: PEFT is missing, or refuses.
        """
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise CommandError("--lora needs PEFT, which is missing. Run: pip install peft") from error
        config = LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=self.targets if self.targets == "all-linear" else self.targets.split("+"),
            use_dora=self.dora,
        )
        try:
            inject_adapter_in_model(config, model)
        except ValueError as error:
            raise CommandError(f"--lora: {error} Name modules of {type(model).__name__} with targets=a+b.") from error
        for parameter in model.parameters():
            if self.dtype == "fp32" and parameter.requires_grad:
                parameter.data = parameter.data.float()

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items())
