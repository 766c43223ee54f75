"""Fine-tune Hugging Face models with a fraction of the activation memory; by default, with the same gradients."""

import os
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hf_memsave.integrations.hooks import uninstall
from hf_memsave.integrations.memsave_argument import install

if TYPE_CHECKING:
    from hf_memsave.config.config import MemSaveConfig
    from hf_memsave.config.wtacrs import WTACRS
    from hf_memsave.count.kept import Kept, measure_kept
    from hf_memsave.errors import ConfigError, KeptTensorChangedError, MeasureError, MemSaveError, PatchError, PlanError
    from hf_memsave.integrations.peft import MemSaveLoraConfig
    from hf_memsave.integrations.trainer import MemSaveCallback, MemSaveMixin, MemSaveTrainer
    from hf_memsave.measure.estimate import estimate
    from hf_memsave.ops.loss.token_log_probs import token_log_probs
    from hf_memsave.patching.patch import PatchReport, patch, report, unpatch
    from hf_memsave.planner.plan import plan

__version__ = "0.1.0"

__all__ = [
    "WTACRS", "ConfigError", "Kept", "KeptTensorChangedError", "MeasureError", "MemSaveCallback", "MemSaveConfig",
    "MemSaveError", "MemSaveLoraConfig", "MemSaveMixin", "MemSaveTrainer", "PatchError", "PatchReport", "PlanError",
    "estimate", "install", "measure_kept", "patch", "plan", "report", "token_log_probs", "uninstall", "unpatch",
]  # fmt: skip

#: Module -> the names above that are loaded from it when they are first used; all others are in ``errors``.
_MODULES = {
    "config.config": ("MemSaveConfig",),
    "config.wtacrs": ("WTACRS",),
    "integrations.peft": ("MemSaveLoraConfig",),
    "integrations.trainer": ("MemSaveCallback", "MemSaveMixin", "MemSaveTrainer"),
    "measure.estimate": ("estimate",),
    "ops.loss.token_log_probs": ("token_log_probs",),
    "patching.patch": ("PatchReport", "patch", "report", "unpatch"),
    "planner.plan": ("plan",),
    "count.kept": ("Kept", "measure_kept"),
}

if os.environ.get("HF_MEMSAVE_NO_HOOKS", "0") in ("", "0"):
    install()


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = next((module for module, names in _MODULES.items() if name in names), "errors")
        value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
        return value
    if name.startswith("_") or find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
