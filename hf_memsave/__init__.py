"""Fine-tune Hugging Face models with a fraction of the activation memory, and the same gradients to the bit."""

from typing import TYPE_CHECKING, Any

from hf_memsave.config import MemSaveConfig
from hf_memsave.errors import ConfigError, KeptTensorChangedError, MemSaveError, PatchError
from hf_memsave.integrations import from_pretrained as _from_pretrained
from hf_memsave.patch import PatchReport, patch, unpatch
from hf_memsave.tape import Kept, measure_kept

if TYPE_CHECKING:
    from hf_memsave.integrations.peft import MemSaveLoraConfig

__version__ = "0.1.0"

_from_pretrained.install()

__all__ = [
    "ConfigError",
    "Kept",
    "KeptTensorChangedError",
    "MemSaveConfig",
    "MemSaveError",
    "MemSaveLoraConfig",
    "PatchError",
    "PatchReport",
    "measure_kept",
    "patch",
    "unpatch",
]


def __getattr__(name: str) -> Any:
    """Names that need PEFT, which is not loaded before they are asked for."""
    if name != "MemSaveLoraConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_memsave.integrations.peft import MemSaveLoraConfig

    return MemSaveLoraConfig
