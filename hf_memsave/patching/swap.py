"""Swapping the class of one module instance, and back: the only way this package changes a model's behaviour.

Only ``forward`` differs. It stands in the class body: ``GradientCheckpointingLayer`` wraps it there, and never sees one
that is assigned later.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave.config.config import WHOLE, MemSaveConfig
from hf_memsave.ops import OPS
from hf_memsave.ops.sampled.sampler import INDEX
from hf_memsave.patching.checkpointed import checkpoint_block, running_by
from hf_memsave.patching.first_step import LEDGER
from hf_memsave.patching.rows import run_in_rows
from hf_memsave.patching.taped import COMPILED, asks_for_index, call_with_batch, run_taped
from hf_memsave.tape import current
from hf_memsave.tape.as_stock import run_counted

_PATCH = "_memsave_patch"
#: The forwards of our classes. (A mark on them would be copied by ``functools.wraps``.)
_FORWARDS: weakref.WeakSet[Any] = weakref.WeakSet()


class Patch(NamedTuple):
    """What one patched class knows."""

    stock: Any  # the class it replaces
    config: MemSaveConfig | None = None  # what the module lays a tape for; None where it lays none
    block: int = 0  # the number of the repeated block that it is
    op: str | None = None  # what replaces the forward; None if that stays
    value: Any = None  # what chose the op
    is_hidden: bool = False  # the instance has a forward of another tool: the tape is laid around the call
    rung: str | None = None  # what of a block runs again: all of it, or where it is compiled, up to what
    rows: int | str | None = None  # how many tokens of each sequence run at a time, as run_in_rows takes it


def patch_of(module: nn.Module) -> Patch | None:
    """What a patched module knows, also under a class that another tool put over ours; None for a stock one."""
    return getattr(type(module), _PATCH, None)


def is_patched(module: nn.Module) -> bool:
    """Whether the module's class is one of ours."""
    return patch_of(module) is not None


def is_wrapped(module: nn.Module) -> bool:
    """Whether another tool (such as FSDP2) has put a class of its own over ours."""
    return patch_of(module) is not None and _PATCH not in vars(type(module))


def stock_class(module: nn.Module) -> Any:
    """The class the module has without us."""
    patch = patch_of(module)
    return type(module) if patch is None else patch.stock


def patched_models(model: nn.Module) -> list[tuple[nn.Module, MemSaveConfig]]:
    """The outermost modules in ``model`` that lay a tape, and the config that each was patched with."""
    found: list[tuple[nn.Module, MemSaveConfig]] = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        patch = patch_of(module)
        if patch is not None and patch.config is not None and not f"{name}.".startswith(inside):
            inside += (f"{name}." if name else "",)
            found.append((module, patch.config))
    return found


def hides_forward(module: nn.Module) -> bool:
    """Whether a forward on the instance keeps the class's from being called (Accelerate's wrappers do call it)."""
    own = module.__dict__.get("forward")
    if own is None or "_hf_hook" in module.__dict__ or _is_from_class(module, own):
        return False
    return not _is_ours(module.__dict__.get("_original_forward"))


def _is_from_class(module: nn.Module, method: Any) -> bool:
    return _is_ours(method) or getattr(method, "__func__", None) is stock_class(module).forward


def _is_ours(method: Any) -> bool:
    return getattr(method, "__func__", None) in _FORWARDS


def set_class(module: nn.Module, cls: Any) -> None:
    """Change the class of one instance, between a stock class and one of ours."""
    module.__class__ = cls
    for name in ("forward", "_old_forward"):  # Accelerate's hooks bind the class's forward, and may leave it there
        if _is_from_class(module, module.__dict__.get(name)):
            setattr(module, name, types.MethodType(cls.forward, module))


#: The classes that modules have: another one of the same patch would be another type.
_CLASSES: weakref.WeakValueDictionary[Patch, Any] = weakref.WeakValueDictionary()


def patched_class(patch: Patch) -> Any:
    """The subclass of ``patch.stock`` that does what ``patch`` says."""
    if (known := _CLASSES.get(patch)) is not None:
        return known
    stock, config, rung = patch.stock, patch.config, patch.rung

    @functools.wraps(stock.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Of now, not of then: Accelerate binds a forward to the instance, and calls it after the class has changed.
        is_compiling = torch.compiler.is_compiling()
        if is_compiling and config is not None:
            from hf_memsave.patching.compiled import keep_the_floor  # which loads the compiler

            keep_the_floor(rung)
        if is_compiling or (now := patch_of(self)) is None:
            return stock.forward(self, *args, **kwargs)
        if now.rows is not None:
            y = run_in_rows(self, now.stock.forward, now.rows, args, kwargs)
            if y is not NotImplemented:
                return y
        if now.config is None:
            return (_run_op if now.op else now.stock.forward)(self, *args, **kwargs)
        return run_taped(self, now.config, now.block, _run_op if now.op else now.stock.forward, args, kwargs)

    @functools.wraps(stock.__call__)
    def taped_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # around the forward of another tool
        now = None if torch.compiler.is_compiling() else patch_of(self)
        if now is None or now.config is None:
            return stock.__call__(self, *args, **kwargs)
        return run_taped(self, now.config, now.block, stock.__call__, args, kwargs)

    if config is not None and asks_for_index(config):  # so that Trainer hands the model that column
        signature = inspect.signature(stock.forward)
        index = inspect.Parameter(INDEX, inspect.Parameter.KEYWORD_ONLY, default=None)
        parameters = sorted([*signature.parameters.values(), index], key=lambda one: one.kind)
        forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        _, _, *state = stock.__reduce_ex__(self, protocol)
        return (_rebuild, (patch,), *state)

    def _replicate_for_data_parallel(self: Any) -> Any:
        replica = stock._replicate_for_data_parallel(self)
        self.__dict__.pop(LEDGER, None)  # one replica has it now, and counts one step
        return replica

    body = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "__reduce_ex__": __reduce_ex__,
        "_replicate_for_data_parallel": _replicate_for_data_parallel,
        _PATCH: patch,
    }
    body["__call__" if patch.is_hidden else "forward"] = taped_call if patch.is_hidden else forward
    if config is not None and issubclass(stock, GradientCheckpointingLayer):
        if config.compile:
            from hf_memsave.patching.compiled import CompiledBlocks

            body[COMPILED] = CompiledBlocks(stock, rung)
        elif rung in WHOLE:
            body |= running_by(checkpoint_block, stock.__call__)
        if config.linear is not None:
            body["__call__"] = call_with_batch(body.get("__call__", stock.__call__))
    cls = type(stock)(stock.__name__, (stock,), body)
    if not patch.is_hidden:
        _FORWARDS.add(cls.forward)
    _CLASSES[patch] = cls
    return cls


def _run_op(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    patch: Any = patch_of(self)
    op = OPS[patch.op]
    if not op.replaces_stock or kwargs or (tape := current()) is None or tape.ledger is None:
        return op.forward(self, patch, *args, **kwargs)
    run = functools.partial(op.forward, self, patch, *args)
    stock = functools.partial(patch.stock.forward, self)
    return run_counted(tape, op.name, run, stock, args, self)


def _rebuild(patch: Patch) -> nn.Module:
    """Called by ``copy.deepcopy`` and ``pickle``: an empty module of the patched class, before its state is set."""
    cls = patched_class(patch)
    empty: nn.Module = cls.__new__(cls)
    return empty
