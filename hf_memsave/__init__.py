"""Fine-tune Hugging Face models with a fraction of the activation memory, and the same gradients to the bit."""

from hf_memsave.config import MemSaveConfig
from hf_memsave.errors import ConfigError, KeptTensorChangedError, MemSaveError, PatchError
from hf_memsave.integrations import from_pretrained as _from_pretrained
from hf_memsave.patch import PatchReport, patch, unpatch
from hf_memsave.tape import Kept, measure_kept

__version__ = "0.1.0"

_from_pretrained.install()

__all__ = [
    "ConfigError",
    "Kept",
    "KeptTensorChangedError",
    "MemSaveConfig",
    "MemSaveError",
    "PatchError",
    "PatchReport",
    "measure_kept",
    "patch",
    "unpatch",
]
