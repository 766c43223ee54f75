"""``MemSaveLoraConfig``: ``get_peft_model(model, config)`` patches the base model and the adapters in one call.

It is PEFT's ``LoraConfig`` with one field more, which is never saved: what it saves is a stock adapter. PEFT hands a
config no model, so the one thing changed in it is ``BaseTuner.inject_adapter``, which afterwards patches the model of a
config of ours; stock configs pass through.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTuner

from hf_memsave.config import MemSaveConfig
from hf_memsave.patch import patch

_MARK = "_memsave_stock"


@dataclass
class MemSaveLoraConfig(LoraConfig):
    """A ``LoraConfig`` whose adapters, and the model they are added to, keep less activation memory.

    Attributes:
        memsave: As for :func:`hf_memsave.patch`: True, a preset's name, a dict of fields or a ``MemSaveConfig``; False
            for a plain ``LoraConfig``.

    Raises:
        ConfigError: ``memsave`` names a preset, field or value that does not exist.
    """

    memsave: MemSaveConfig | str | bool | dict[str, Any] | None = field(default=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.memsave = MemSaveConfig.resolve(self.memsave)

    def to_dict(self) -> dict[str, Any]:
        """The fields of the ``LoraConfig``."""
        fields = super().to_dict()
        fields.pop("memsave", None)
        return fields


def install() -> None:
    """Let PEFT patch for a :class:`MemSaveLoraConfig`; does nothing the second time."""
    if not hasattr(BaseTuner.inject_adapter, _MARK):
        BaseTuner.inject_adapter = _then_patch(BaseTuner.inject_adapter)


def _then_patch(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def inject_adapter(self: BaseTuner, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, model, adapter_name, *args, **kwargs)
        config = self.peft_config[adapter_name]
        if isinstance(config, MemSaveLoraConfig) and config.memsave is not None:
            patch(model, config.memsave)
        return result

    setattr(inject_adapter, _MARK, stock)
    return inject_adapter
