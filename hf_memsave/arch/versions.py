"""What versions of Transformers call differently: each is asked for here, and by no version's number."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

#: What a model calls the keys and values that it is handed: from Transformers 5.24 on, and before (still taken then).
_CACHE = ("cache", "past_key_values")


def cache_name(model: nn.Module) -> str:
    """What ``model.forward`` calls its cache."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in _CACHE if name in taken), _CACHE[-1])


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among a model's arguments; None if there is none."""
    return next((arguments[name] for name in _CACHE if arguments.get(name) is not None), None)
