"""What runs again under the autocast that it ran under; below the floor, products of linears do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hf_memsave.tape.content import Content
from hf_memsave.tape.tensors import is_plain
from hf_memsave.tape.wrappers import parts_of, taken_apart


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
    """A product, or the forward of a linear that calls no product, under the autocast that it ran under.

    Its parameters are arguments as well, so that one that is written to before backward raises, as in stock. Arguments
    that wrap others are none: a parameter is held here, and of an activation (tensor parallelism's) the one tensor that
    it wraps is the argument, as that of the output is what this gives.
    """

    __slots__ = ("func", "autocast", "wraps", "gathers")

    def __init__(self, func: Callable[..., Tensor], device: str, gathers: Iterable[Callable[[], None]] = ()) -> None:
        self.func, self.autocast, self.gathers = func, AutocastState(device), gathers
        self.wraps: list[Any] = []  # places of arguments, each with its parameter or what wraps what is given there

    def takes(self, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The arguments to call this with in place of ``args``; None where one of them cannot be had again."""
        given = list(args)
        for place, argument in enumerate(args):
            if not isinstance(argument, Tensor) or is_plain(argument):
                continue
            if isinstance(argument, nn.Parameter):
                held = Content(None)
                held.keep(argument.detach())
                given[place] = None
                self.wraps.append((place, held, None))
                continue
            parts, wrap = taken_apart(argument) or ((), None)
            if len(parts) != 1 or wrap is None:
                return None
            given[place] = parts[0]
            self.wraps.append((place, None, wrap))
        return tuple(given)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The linear's output, or what that wraps: a new tensor."""
        given = list(args)
        for place, held, wrap in self.wraps:
            given[place] = held.get() if wrap is None else wrap([given[place]])
        with self.autocast:
            out = self.func(*given, **kwargs)
        return out if is_plain(out) else parts_of(out)[0]
