"""Functions that are recomputed under the autocast of their forward, as are products of linears below the floor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_memsave.tape.content import Content
from hf_memsave.tape.tensors import is_plain
from hf_memsave.tape.wrappers import parts_of, taken_apart


class AutocastState(NamedTuple):
    """The autocast state of a device type, which any thread may enter again later: a dtype, or None where it is off."""

    device: str
    dtype: torch.dtype | None

    @classmethod
    def now(cls, device: str) -> AutocastState:
        """Return the state of ``device`` as it is now."""
        is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        return cls(device, torch.get_autocast_dtype(device) if is_on else None)

    def run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``func(*args, **kwargs)`` under this state."""
        if AutocastState.now(self.device) == self:
            return func(*args, **kwargs)
        with torch.autocast(self.device, dtype=self.dtype, enabled=self.dtype is not None, cache_enabled=False):
            return func(*args, **kwargs)


class RecomputedProduct:
    """A product, or the forward of a linear that calls no product, recomputed under the autocast that it ran under.

    Its parameters are arguments, so that a write to one before backward raises, as in stock. Of arguments that wrap
    others, a parameter is kept here, and of an activation (tensor parallelism's), as of the output, the inner tensor.
    """

    __slots__ = ("func", "autocast", "wraps", "gathers")

    def __init__(self, func: Callable[..., Tensor], device: str, gathers: Iterable[Callable[[], None]] = ()) -> None:
        self.func, self.autocast, self.gathers = func, AutocastState.now(device), gathers
        self.wraps: list[Any] = []  # places of arguments, each with its parameter or what wraps what is given there

    def arguments_for(self, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the arguments to call this with in place of ``args``; None if what one wraps is not one tensor."""
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
        """Return the output, or the tensor that it wraps: a new tensor."""
        given = list(args)
        for place, held, wrap in self.wraps:
            given[place] = held.get() if wrap is None else wrap([given[place]])
        out = self.autocast.run(self.func, *given, **kwargs)
        return out if is_plain(out) else parts_of(out)[0]
