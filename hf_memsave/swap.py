"""Swapping the class of one module instance, and back: the only way this package changes a model's behaviour.

The new class has the old one's name, parameters, buffers and state dict; only its ``forward`` differs. It stands in the
class body: ``GradientCheckpointingLayer`` wraps it there, and never sees one that is assigned later.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_memsave.errors import PatchError
from hf_memsave.ops import OPS, Binding, attention
from hf_memsave.tape import current

_BINDING = "_memsave_binding"


def binding_of(module: nn.Module) -> Binding | None:
    """The binding of a patched module; None if its class is not one of ours."""
    return vars(type(module)).get(_BINDING)


def is_patched(module: nn.Module) -> bool:
    """Whether the class of ``module`` is one of ours, or another tool's class over one of ours."""
    return hasattr(type(module), _BINDING)


def swap_in(module: nn.Module, op: str, names: Mapping[str, str], value: str) -> None:
    """Make ``module`` (stock, or patched otherwise) run ``op``."""
    _set_class(module, _patched_class(stock_class(module), op, tuple(sorted(names.items())), value))


def swap_out(module: nn.Module, name: str) -> None:
    """Give a patched module its stock class back.

    Raises:
        PatchError: Another tool has put a class of its own over ours.
    """
    if binding_of(module) is None and is_patched(module):
        raise PatchError(
            f"cannot undo {name or 'the model'}: its class is {type(module).__name__} of {type(module).__module__}, "
            "which another tool (such as FSDP2) put over ours since. Undo before you wrap, or build the model anew."
        )
    _set_class(module, stock_class(module))


def stock_class(module: nn.Module) -> Any:
    """The class the module has without us."""
    binding = binding_of(module)
    return type(module) if binding is None else binding.stock


def _set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    if type(module) is cls:
        return
    module.__class__ = cls
    if "_old_forward" in module.__dict__:  # Accelerate's hooks have bound the old class's forward
        module._old_forward = types.MethodType(cls.forward, module)


@functools.cache
def _patched_class(stock: Any, op: str, names: tuple[tuple[str, str], ...], value: str) -> Any:
    binding = Binding(stock=stock, op=OPS[op], names=dict(names), value=value)
    if binding.op.opens_tape:

        @functools.wraps(stock.forward)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return binding.op.forward(self, binding, *args, **kwargs)
    else:

        @functools.wraps(stock.forward)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or current() is None:
                return stock.forward(self, *args, **kwargs)
            return binding.op.forward(self, binding, *args, **kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        _, _, *state = stock.__reduce_ex__(self, protocol)
        return (_rebuild, (stock, op, names, value), *state)

    body = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "__reduce_ex__": __reduce_ex__,
        "forward": forward,
        _BINDING: binding,
    }
    return type(stock)(stock.__name__, (stock,), body)


def _rebuild(stock: Any, op: str, names: tuple[tuple[str, str], ...], value: str) -> nn.Module:
    """Called by ``copy.deepcopy`` and ``pickle``: an empty module of the patched class, before its state is set."""
    attention.register()
    cls = _patched_class(stock, op, names, value)
    return cls.__new__(cls)
