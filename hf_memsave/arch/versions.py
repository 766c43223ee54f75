"""What versions of Transformers call differently: each is asked for here, and by no version's number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: What a model calls the keys and values that it is handed: from Transformers 5.24 on, and before (still taken then).
_CACHE = ("cache", "past_key_values")


#: What checkpointing is called, of a model and of Trainer's arguments: from Transformers 5.23 on, and before.
_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among a model's arguments; None if there is none."""
    return next((arguments[name] for name in _CACHE if arguments.get(name) is not None), None)


def enable_checkpointing(model: Any, **options: Any) -> None:
    """Have a model checkpoint its blocks, with ``options`` of ``torch.utils.checkpoint.checkpoint``."""
    names = [f"{name}_enable" for name in _CHECKPOINTING]
    getattr(model, next(name for name in names if hasattr(model, name)))({"use_reentrant": False} | options)


def is_checkpointing(args: Any) -> bool:
    """Whether Trainer's arguments ask for checkpointing."""
    return any(getattr(args, name, False) for name in _CHECKPOINTING)
