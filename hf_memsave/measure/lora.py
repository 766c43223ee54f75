"""LoRA adapters, put into a model to be measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from transformers import PreTrainedModel

from hf_memsave.errors import MeasureError


@dataclass(frozen=True)
class Lora:
    """PEFT's LoRA, by short names.

    Attributes:
        r: The rank.
        alpha: ``lora_alpha``.
        dropout: ``lora_dropout``.
        targets: Names of modules, joined by "+".
        dtype: That of the adapters: "fp32", PEFT's default, or "model" for the model's own (that of its embeddings
            if its linears are quantized).
        dora: With DoRA's magnitudes.
    """

    r: int = 8
    alpha: int = 16
    dropout: float = 0.0
    targets: str = "all-linear"
    dtype: str = "fp32"
    dora: bool = False

    def __post_init__(self) -> None:
        if self.r < 1 or self.alpha <= 0 or not 0 <= self.dropout < 1 or self.dtype not in ("fp32", "model"):
            raise MeasureError(
                "lora: expected r from 1, alpha above 0, dropout in [0, 1), dtype fp32 or model, "
                f"got {self}. Change that."
            )

    def add_to(self, model: PreTrainedModel) -> None:
        """Freeze the model and put adapters into it; MeasureError if PEFT is missing, or refuses."""
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise MeasureError("LoRA needs PEFT, which is missing. Run: pip install peft") from error
        own = next(p.dtype for p in model.parameters() if p.is_floating_point())
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
            raise MeasureError(f"LoRA: {error} Name modules of {type(model).__name__} with targets=a+b.") from error
        for parameter in model.parameters():
            if parameter.requires_grad:  # on the meta device, PEFT leaves them in fp32
                parameter.data = parameter.data.to(torch.float32 if self.dtype == "fp32" else own)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items())
