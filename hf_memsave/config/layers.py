"""``MemSaveConfig.layers``: in how many blocks each kind of module is converted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_memsave.config.files import listed
from hf_memsave.config.wtacrs import is_int
from hf_memsave.errors import ConfigError

#: The fields that say what to do with a kind of module.
KINDS = ("activation", "norm", "dropout", "attention", "lora")
#: The fields that ``layers`` can limit.
LIMITED = (*KINDS, "checkpoint")


def as_pairs(layers: Any) -> tuple[tuple[str, float], ...] | None:
    """Returns ``layers`` as sorted pairs, which can be hashed; None where nothing is limited.

    Raises:
        ConfigError: It is no mapping, or a kind or a number in it is none.
    """
    if layers is None:
        return None
    remedy = "Use layers={'norm': 6}, or leave it out to convert every block."
    try:
        pairs = dict(layers) if isinstance(layers, (Mapping, tuple)) else None
    except (TypeError, ValueError):
        pairs = None
    if pairs is None:
        raise ConfigError(f"MemSaveConfig.layers must be a mapping or None, got {layers!r}. {remedy}")
    for kind, number in pairs.items():
        if kind not in LIMITED:
            raise ConfigError(f"MemSaveConfig.layers: expected kinds {listed(LIMITED)}, got {kind!r}. {remedy}")
        expected = "a whole number of blocks, 0 or more"
        is_right = is_int(number) and number >= 0
        if kind == "checkpoint" and isinstance(number, float):
            expected = "a whole number of blocks, or a part of them from 0.0 to 1.0"
            is_right = 0 <= number <= 1
            remedy = "Use 0.5 for the first half, or leave it out for all blocks."
        if not is_right:
            raise ConfigError(f"MemSaveConfig.layers[{kind!r}] must be {expected}, got {number!r}. {remedy}")
    return tuple(sorted(pairs.items())) or None
