"""Names that differ between versions of Transformers, each looked up here, never by a version's number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """Return the key-value cache among a model's arguments; None if there is none."""
    names = "cache", "past_key_values"  # since Transformers 5.24, and before (still accepted)
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)


def enable_checkpointing(model: Any, **options: Any) -> None:
    """Turn on checkpointing of a model's blocks, with ``options`` of ``torch.utils.checkpoint.checkpoint``."""
    names = "activation_checkpointing_enable", "gradient_checkpointing_enable"  # since Transformers 5.23, and before
    getattr(model, next(name for name in names if hasattr(model, name)))({"use_reentrant": False} | options)
