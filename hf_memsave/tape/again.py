"""What runs again under the autocast that it ran under; below the floor, linears do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: Functions that remaking one tensor may run, where products may be among them: those of a block, and some twice.
MOST_WORK_OF_A_BLOCK = 2048


class AutocastState:
    """The autocast state of a device type now, to be entered again later."""

    __slots__ = ("device", "enabled", "dtype", "inner")

    def __init__(self, device: str) -> None:
        self.device = device
        self.inner: torch.autocast | None = None
        self.enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        self.dtype = torch.get_autocast_dtype(device) if self.enabled else None

    def __enter__(self) -> None:
        now = AutocastState(self.device)
        if (now.enabled, now.dtype) != (self.enabled, self.dtype):
            self.inner = torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)
            self.inner.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.inner is not None:
            self.inner.__exit__(*error)
            self.inner = None


def run_under(autocast: AutocastState, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """``func(*args, **kwargs)`` under an autocast state."""
    with autocast:
        return func(*args, **kwargs)


class LinearAgain:
    """A linear's own forward, of whatever class (quantized or not), under the autocast that it ran under.

    Its parameters are arguments as well, so that one that is written to before backward raises, as in stock.
    """

    __slots__ = ("forward", "autocast")

    def __init__(self, forward: Callable[[Tensor], Tensor], device: str) -> None:
        self.forward, self.autocast = forward, AutocastState(device)

    def __call__(self, x: Tensor, *parameters: Tensor) -> Tensor:
        """The linear's output.

        Returns:
            A new tensor.
        """
        with self.autocast:
            return self.forward(x)
