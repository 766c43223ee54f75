"""Swapping the class of one module instance, and back: the only way this package changes a model's behaviour.

The new class has the old one's name, parameters, buffers and state dict; only its ``forward`` differs. It stands in the
class body: ``GradientCheckpointingLayer`` wraps it there, and never sees one that is assigned later.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave.errors import PatchError
from hf_memsave.ops import OPS, Binding, attention
from hf_memsave.ops.block import asks_for_index, call_with_batch, entered
from hf_memsave.sampling.sampler import INDEX
from hf_memsave.tape import current

_BINDING = "_memsave_binding"
#: The methods of our classes. (A mark on them would be copied by ``functools.wraps``.)
_METHODS: set[Any] = set()


def binding_of(module: nn.Module) -> Binding | None:
    """The binding of a patched module, also under a class that another tool put over ours; None for a stock one."""
    return getattr(type(module), _BINDING, None)


def is_patched(module: nn.Module) -> bool:
    """Whether the module runs one of our ops."""
    return binding_of(module) is not None


def is_wrapped(module: nn.Module) -> bool:
    """Whether another tool (such as FSDP2) has put a class of its own over ours."""
    return binding_of(module) is not None and _BINDING not in vars(type(module))


def stock_class(module: nn.Module) -> Any:
    """The class the module has without us."""
    binding = binding_of(module)
    return type(module) if binding is None else binding.stock


def patched_models(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """The outermost modules in ``model`` that lay a tape, and the config that each was patched with."""
    found: list[tuple[nn.Module, Any]] = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        binding = binding_of(module)
        config = None if binding is None else binding.tape_config
        if config is not None and not f"{name}.".startswith(inside):
            inside += (f"{name}." if name else "",)
            found.append((module, config))
    return found


def patched_class(stock: Any, op: str, names: Mapping[str, str], value: Any, alone: Any = None) -> Any:
    """The subclass of ``stock`` whose forward is that of ``op``; with ``alone``, a config, under a tape of its own."""
    return _patched_class(stock, op, tuple(sorted(names.items())), value, alone)


def refuse_wrapped(name: str, module: nn.Module) -> None:
    """Raise for a module whose class we cannot change any more.

    Raises:
        PatchError: Another tool has put a class of its own over ours.
    """
    if is_wrapped(module):
        raise PatchError(
            f"cannot undo {name or 'the model'}: its class is {type(module).__name__} of {type(module).__module__}, "
            "which another tool (such as FSDP2) put over ours since. Undo before you wrap, or build the model anew."
        )


def hides_forward(module: nn.Module) -> bool:
    """Whether a forward on the instance keeps the class's from being called (Accelerate's wrappers do call it)."""
    own = module.__dict__.get("forward")
    own = getattr(own, "_memsave_watches", own)  # our own StepMeter, before the forward it waits for
    if own is None or "_hf_hook" in module.__dict__ or _is_from_class(module, own):
        return False
    return not _is_ours(module.__dict__.get("_original_forward"))


def _is_from_class(module: nn.Module, method: Any) -> bool:
    return _is_ours(method) or getattr(method, "__func__", None) is stock_class(module).forward


def _is_ours(method: Any) -> bool:
    return getattr(method, "__func__", None) in _METHODS


def set_class(module: nn.Module, cls: Any) -> None:
    """Change the class of one instance, between a stock class and one of ours."""
    if type(module) is cls:
        return
    module.__class__ = cls
    for name in ("forward", "_old_forward"):  # Accelerate's hooks bind the class's forward, and may leave it there
        if _is_from_class(module, module.__dict__.get(name)):
            setattr(module, name, types.MethodType(cls.forward, module))


@functools.cache
def _patched_class(stock: Any, op: str, names: tuple[tuple[str, str], ...], value: Any, alone: Any) -> Any:
    method = OPS[op].method
    stock_method = getattr(stock, method)

    @functools.wraps(stock_method)
    def patched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Of now, not of then: Accelerate binds a forward to the instance, and calls it after the class has changed.
        binding = None if torch.compiler.is_compiling() else binding_of(self)
        if binding is None or (current() is None and not binding.op.opens_tape):
            return stock_method(self, *args, **kwargs)
        return binding.op.forward(self, binding, *args, **kwargs)

    binding = Binding(stock=stock, op=OPS[op], names=dict(names), value=value, alone=alone)
    if op == "block" and asks_for_index(binding):  # so that Trainer hands the model that column
        signature = inspect.signature(stock_method)
        *before, last = signature.parameters.values()
        after = [last] if last.kind is inspect.Parameter.VAR_KEYWORD else []
        before += [] if after else [last]
        index = inspect.Parameter(INDEX, inspect.Parameter.KEYWORD_ONLY, default=None)
        patched.__signature__ = signature.replace(parameters=[*before, index, *after])  # type: ignore[attr-defined]

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        _, _, *state = stock.__reduce_ex__(self, protocol)
        return (_rebuild, (stock, op, names, value, alone), *state)

    body = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "__reduce_ex__": __reduce_ex__,
        method: patched,
        _BINDING: binding,
    }
    if op == "block" and issubclass(stock, GradientCheckpointingLayer) and getattr(value, "linear", None) is not None:
        body["__call__"] = call_with_batch(stock)
    if alone is not None:
        body["forward"] = _under_its_own_tape(stock, patched if method == "forward" else stock.forward)
    cls = type(stock)(stock.__name__, (stock,), body)
    _METHODS.update((getattr(cls, method), cls.forward) if alone is not None else (getattr(cls, method),))
    return cls


def _under_its_own_tape(stock: Any, inner: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a layer that was patched by itself; where a tape is innermost already, it takes that."""

    @functools.wraps(stock.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        binding = None if torch.compiler.is_compiling() else binding_of(self)
        if binding is None or binding.alone is None or not torch.is_grad_enabled():
            return inner(self, *args, **kwargs)
        with entered(self, binding, args, kwargs):
            return inner(self, *args, **kwargs)

    return forward


def _rebuild(stock: Any, op: str, names: tuple[tuple[str, str], ...], value: Any, alone: Any = None) -> nn.Module:
    """Called by ``copy.deepcopy`` and ``pickle``: an empty module of the patched class, before its state is set."""
    attention.register()
    cls = _patched_class(stock, op, names, value, alone)
    return cls.__new__(cls)
