"""Fine-tune Hugging Face models with a fraction of the activation memory; by default, with the same gradients."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_memsave.config import MemSaveConfig
from hf_memsave.errors import (
    ConfigError,
    KeptTensorChangedError,
    MeasureError,
    MemSaveError,
    PatchError,
    PlanError,
)
from hf_memsave.integrations import install
from hf_memsave.integrations.hooks import uninstall
from hf_memsave.patching.patch import PatchReport, patch, unpatch
from hf_memsave.tape import Kept, measure_kept
from hf_memsave.wtacrs import WTACRS

if TYPE_CHECKING:
    from hf_memsave.integrations.peft import MemSaveLoraConfig
    from hf_memsave.integrations.trainer import MemSaveCallback, MemSaveMixin, MemSaveTrainer
    from hf_memsave.measure.estimate import estimate
    from hf_memsave.planner.plan import plan

__version__ = "0.1.0"

if os.environ.get("HF_MEMSAVE_NO_HOOKS", "0") in ("", "0"):
    install()

__all__ = [
    "WTACRS",
    "ConfigError",
    "Kept",
    "KeptTensorChangedError",
    "MeasureError",
    "MemSaveCallback",
    "MemSaveConfig",
    "MemSaveError",
    "MemSaveLoraConfig",
    "MemSaveMixin",
    "MemSaveTrainer",
    "PatchError",
    "PatchReport",
    "PlanError",
    "estimate",
    "install",
    "measure_kept",
    "patch",
    "plan",
    "uninstall",
    "unpatch",
]


#: Names that need what is not loaded before they are asked for: PEFT, or the Trainer.
_LAZY = {
    "MemSaveCallback": "hf_memsave.integrations.trainer",
    "MemSaveLoraConfig": "hf_memsave.integrations.peft",
    "MemSaveMixin": "hf_memsave.integrations.trainer",
    "MemSaveTrainer": "hf_memsave.integrations.trainer",
    "estimate": "hf_memsave.measure.estimate",
    "plan": "hf_memsave.planner.plan",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
