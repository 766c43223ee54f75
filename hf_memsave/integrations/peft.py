"""``MemSaveLoraConfig``: ``get_peft_model(model, config)`` patches the base model and the adapters in one call."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from peft import LoraConfig
from peft.tuners import tuners_utils

from hf_memsave.config.config import MemSaveConfig
from hf_memsave.errors import ConfigError
from hf_memsave.integrations.memsave_argument import teach_peft


@dataclass
class MemSaveLoraConfig(LoraConfig):
    """A ``LoraConfig`` whose adapters, and the model they are added to, keep less; what it saves is a stock adapter.

    Attributes:
        memsave: As for :func:`hf_memsave.patch`: a preset's name, a dict of fields or a ``MemSaveConfig``; True for
            what the model is patched with already, or else for the exact default; False for a plain ``LoraConfig``.

    Raises:
        ConfigError: ``memsave`` names a preset, field or value that does not exist, or another field asks for a kind of
            adapter that cannot be saved.
    """

    memsave: MemSaveConfig | str | bool | dict[str, Any] | None = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if MemSaveConfig.resolve(self.memsave) is None:  # a wrong name is refused here
            return
        teach_peft(tuners_utils)
        variants = [f.name for f in fields(self) if f.metadata.get("is_lora_variant") and f.name != "use_dora"]
        asked = [name for name in (*variants, "target_parameters") if getattr(self, name, None)]
        if asked:
            raise ConfigError(
                f"MemSaveLoraConfig expected LoRA, rsLoRA or DoRA on layers, got {' and '.join(asked)}, whose own "
                "tensors it cannot save. Use peft.LoraConfig and hf_memsave.patch(model): that trains like stock, "
                "saves in the base model, and reports the rest."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of the ``LoraConfig``, without ``memsave``."""
        stock: dict[str, Any] = super().to_dict()
        stock.pop("memsave", None)
        return stock

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, perhaps in another process, where PEFT is to be wrapped too."""
        self.__dict__.update(state)
        teach_peft(tuners_utils)
