"""``Lora``: the LoRA adapters of a step that is measured or estimated."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hf_memsave.errors import MeasureError


@dataclass(frozen=True)
class Lora:
    """Fields of PEFT's ``LoraConfig``, by short names."""

    r: int = 8  # the rank
    alpha: int = 16  # lora_alpha
    dropout: float = 0.0  # lora_dropout
    targets: str = "all-linear"  # names of modules, joined by "+"
    dtype: str = "fp32"  # PEFT's default, or "model": that of the model, or of its embeddings if linears are quantized
    dora: bool = False  # with DoRA's magnitudes

    def __post_init__(self) -> None:
        if self.r < 1 or self.alpha <= 0 or not 0 <= self.dropout < 1 or self.dtype not in ("fp32", "model"):
            raise MeasureError(
                "lora: expected r from 1, alpha above 0, dropout in [0, 1), dtype fp32 or model, "
                f"got {self}. Change that."
            )

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items())
