"""What a user asks for: a configuration, its files, layers, sizes and sampling."""

from hf_memsave.config.config import MemSaveConfig
from hf_memsave.config.wtacrs import WTACRS

__all__ = ["WTACRS", "MemSaveConfig"]
