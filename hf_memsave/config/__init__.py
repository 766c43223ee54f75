"""The configuration that a user asks for: its fields, files, layers, sizes and sampling."""

from hf_memsave.config.config import MemSaveConfig
from hf_memsave.config.wtacrs import WTACRS

__all__ = ["WTACRS", "MemSaveConfig"]
