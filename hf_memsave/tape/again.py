"""What runs again under the autocast that it ran under; below the floor, products of linears do."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_memsave.tape.handles import Held
from hf_memsave.tape.record import Sharded
from hf_memsave.tape.tensors import is_plain
from hf_memsave.tape.wrappers import parts_of, taken_apart

#: Functions that remaking one tensor may run, where products may be among them: those of a block, and some twice.
MOST_WORK_OF_A_BLOCK = 2048
#: Products of linears, and where the weight stands among their arguments.
_WEIGHT = {F.linear: 1, torch.addmm: 2}
_KEPT = (
    "hf_memsave: a linear that checkpoint= chose is in a sharding unit of its own below a block (FSDP1), whose weight "
    "is gone when it would run again, so its output is kept. Wrap whole blocks, or use FSDP2."
)


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
        self.wraps: list[tuple[int, Callable[[Any], Tensor]]] = []

    def takes(self, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The arguments to call this with in place of ``args``; None where one of them cannot be had again."""
        given = list(args)
        for place, argument in enumerate(args):
            if not isinstance(argument, Tensor) or is_plain(argument):
                continue
            if isinstance(argument, nn.Parameter):
                given[place] = None
                self.wraps.append((place, partial(_held, Held(argument))))
                continue
            parts, wrap = taken_apart(argument) or ((), None)
            if len(parts) != 1 or wrap is None:
                return None
            given[place] = parts[0]
            self.wraps.append((place, partial(_wrapped, wrap)))
        return tuple(given)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The linear's output, or what that wraps.

        Returns:
            A new tensor.
        """
        given = list(args)
        for place, wrap in self.wraps:
            given[place] = wrap(given[place])
        with self.autocast:
            out = self.func(*given, **kwargs)
        return out if is_plain(out) else parts_of(out)[0]


def _held(handle: Held, _: None) -> Tensor:
    return handle.get()


def _wrapped(wrap: Callable[[list[Tensor]], Tensor], part: Tensor) -> Tensor:
    return wrap([part])


def runs_again(tape: Any, out: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Have ``out`` made again in backward, if the weight of the product is that of a linear chosen for it.

    Args:
        tape: The one whose ``again`` holds where such weights are found.
        out: What ``func(*args, **kwargs)`` gave.
        func: As the model called it: casts of autocast are made again too.
        args: As the model gave them.
        kwargs: As the model gave them.

    Returns:
        Whether it is.
    """
    place = _WEIGHT.get(func, len(args))
    if place >= len(args) or not any(own.get("weight") is args[place] for own in tape.again):
        return False
    return record_again(tape, out, func, args, kwargs)


def record_again(
    tape: Any, out: Tensor, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """``func(*args, **kwargs)``, under the autocast of now, gives ``out`` again: whether that can be recorded."""
    parts, gathers = parts_of(out), gathers_of(tape, args)
    if gathers is None:
        warnings.warn(_KEPT, stacklevel=2)
        return False
    again = LinearAgain(func, out.device.type, gathers)
    given = again.takes(args) if len(parts) == 1 and not any(map(_is_wrapper, kwargs.values())) else None
    if given is None:
        return False
    tape.most_work = MOST_WORK_OF_A_BLOCK
    tape.record(parts[0], again, given, kwargs)
    return True


def gathers_of(tape: Any, args: Iterable[Any]) -> Collection[Callable[[], None]] | None:
    """What brings back, in backward, the parameters among ``args`` that a sharding engine takes away in between.

    Returns:
        A function for each unit of the engine; None where it has none for a parameter that is there only while its own
        module runs.
    """
    if tape.root.mark_of is None:
        return ()
    marks = [mark for a in args if isinstance(a, Tensor) and isinstance(mark := tape.record_of(a), Sharded)]
    found: Any = dict.fromkeys(m.gather for m in marks if m.gather or m.is_brief)  # in order on every rank
    return None if None in found else found


def _is_wrapper(argument: Any) -> bool:
    return isinstance(argument, Tensor) and not is_plain(argument)
