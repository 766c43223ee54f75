"""What versions of Transformers call differently: each is asked for here, and by no version's number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: What a model calls the keys and values that it is handed: from Transformers 5.24 on, and before (still taken then).
_CACHE = ("cache", "past_key_values")


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among a model's arguments; None if there is none."""
    return next((arguments[name] for name in _CACHE if arguments.get(name) is not None), None)


def enable_checkpointing(model: Any, **options: Any) -> None:
    """Have a model checkpoint its blocks, with ``options`` of ``torch.utils.checkpoint.checkpoint``."""
    names = (
        "activation_checkpointing_enable",
        "gradient_checkpointing_enable",
    )  # since Transformers 5.23, and before
    getattr(model, next(name for name in names if hasattr(model, name)))({"use_reentrant": False} | options)
