"""``Lora``: the LoRA adapters of a step that is measured or estimated, also as PEFT saves them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_memsave.config.files import fields_of
from hf_memsave.errors import MeasureError

#: Fields of PEFT's adapters that ask for more than plain, equal ones -> the value that does not.
_OTHERS = dict.fromkeys(
    "rank_pattern alpha_pattern layers_to_transform layer_replication target_parameters exclude_modules "
    "modules_to_save trainable_token_indices".split()
) | {"peft_type": "LORA", "bias": "none"}


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
            reason = f"lora: expected r from 1, alpha above 0, dropout in [0, 1), dtype fp32 or model, got {self}."
            raise MeasureError(reason, "Change that.")

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items())


def adapter_in(name: str) -> dict[str, Any]:
    """Return the fields of the PEFT adapter in a folder, with its base model's name; none of another folder."""
    path = Path(name, "adapter_config.json")
    fields: dict[str, Any] = fields_of(path) if path.is_file() else {}
    if path.is_file() and not fields.get("base_model_name_or_path"):
        raise MeasureError(f"{path}: expected base_model_name_or_path, got none. Add the base model's name or folder.")
    return fields


def lora_in(name: str) -> Lora | None:
    """Return the LoRA adapters in a folder, None for another folder; MeasureError for adapters of another kind."""
    if not (found := adapter_in(name)):
        return None
    saved = [name for name in found.get("modules_to_save") or () if name not in ("classifier", "score")]  # but heads
    given = {"peft_type": "LORA", "bias": "none", **found, "modules_to_save": saved}
    odd = {name: value for name, value in given.items() if value and name in _OTHERS and value != _OTHERS[name]}
    if odd or not isinstance(targets := found.get("target_modules"), list):
        raise MeasureError(
            f"{name}: expected LoRA adapters, alike in all modules of a list of names, got {odd or targets!r}.",
            "Name the base model, and lora=Lora(...).", "Name the base model, with --lora r=8,targets=q_proj+v_proj.",
        )  # fmt: skip
    known = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "use_dora": False, **found}  # PEFT's defaults
    return Lora(known["r"], known["lora_alpha"], known["lora_dropout"], "+".join(targets), dora=known["use_dora"])
