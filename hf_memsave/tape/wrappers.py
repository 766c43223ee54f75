"""Tensors that wrap others (DTensor, quantized ones), whose own storages are nominal: unwrapped, and wrapped again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_memsave.tape.handles import Handle, written
from hf_memsave.tape.private import asks_classes, no_subclasses, pop_mode, push_mode
from hf_memsave.tape.tensors import is_asked, is_plain


def taken_apart(tensor: Tensor) -> tuple[list[Tensor], Callable[[Iterable[Tensor]], Tensor]] | None:
    """Return the tensors that ``tensor`` wraps, and a function to wrap such; None if unknown, or still on their way."""
    if hasattr(tensor, "taken_apart"):
        return tensor.taken_apart()
    if not is_traceable_wrapper_subclass(tensor) or hasattr(tensor, "trigger_wait"):
        return None
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    parts = {name: part for name, part in inner.items() if isinstance(part, Tensor)}
    others = {name: other for name, other in inner.items() if name not in parts}
    make, names, shape, stride = type(tensor).__tensor_unflatten__, list(parts), tensor.shape, tensor.stride()

    def wrap(parts: Iterable[Tensor]) -> Tensor:
        return make({**others, **dict(zip(names, parts, strict=True))}, context, shape, stride)

    return list(parts.values()), wrap


def waited(see: Callable[[Tensor], Any], argument: Any) -> Any:
    """Return an argument of a call that has run, with the results of collectives in place of tensors awaiting them."""
    if isinstance(argument, (list, tuple)):
        return type(argument)([waited(see, a) for a in argument])
    if type(argument) is dict:
        return {k: waited(see, a) for k, a in argument.items()}
    if not isinstance(argument, Tensor):
        return argument
    if hasattr(argument, "trigger_wait"):
        return argument.elem  # type: ignore[attr-defined]
    if not is_asked(type(argument)):
        return argument
    see(argument)  # else the detached tensor of a parameter may not be known for one
    with no_subclasses():
        return argument.detach()


def are_asked(types: Iterable[type]) -> bool:
    """Return whether these tensor classes are asked before functions run: not in a backward that one has called."""
    own = [kind for kind in types if kind is not Tensor]  # which is among them where a function is Python's
    return bool(own) and asks_classes() and all(map(is_asked, own))


def by_class(tape: TorchFunctionMode, func: Callable[..., Any], types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run ``func`` by the classes' ``__torch_function__``: the tape records what it calls, as if none were asked."""
    push_mode(tape)
    try:
        for kind in types:
            out = kind.__torch_function__(func, types, args, kwargs)
            if out is not NotImplemented:
                return out
    finally:
        pop_mode()
    return func(*args, **kwargs)  # raises, as in stock


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors with the bytes of ``tensor``: itself or what it wraps; none if that is not known."""
    if is_plain(tensor):
        return [tensor]
    if not is_traceable_wrapper_subclass(tensor):
        return []
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [part for wrapped in inner if isinstance(wrapped, Tensor) for part in parts_of(wrapped)]


class Wrapped(Handle):
    """A tensor that wraps one other (a DTensor), kept as that; a write through it shows in its own version alone."""

    __slots__ = ("inner", "wrap", "wrapper", "version")

    def __init__(self, tensor: Tensor, inner: Handle, wrap: Callable[[list[Tensor]], Tensor]) -> None:
        self.inner, self.wrap, self.wrapper, self.version = inner, wrap, weakref.ref(tensor), tensor._version

    def get(self) -> Tensor:
        """Return the inner tensor, wrapped again."""
        wrapper = self.wrapper()
        if wrapper is not None and wrapper._version != self.version:
            raise written(wrapper, self.version)
        return self.wrap([self.inner.get()])
