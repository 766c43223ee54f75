"""The classes of patched modules, which subclass stock's: swapping a module's class is how a model is changed.

They override ``forward`` in the class body: ``GradientCheckpointingLayer`` wraps it there, and not if assigned later.
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
    """The settings of one patched class."""

    stock: Any  # the class it replaces
    config: MemSaveConfig | None = None  # of the tape that the module runs under; None if it needs none
    block: int = 0  # the number of the repeated block
    op: str | None = None  # the op that replaces the forward; None if that stays
    value: Any = None  # the value that chose the op
    is_hidden: bool = False  # another tool's forward is on the instance: the tape is around ``__call__``
    rung: str | None = None  # ``checkpoint``, for whole blocks that run again and for compiled graphs
    rows: int | str | None = None  # the argument of ``run_in_rows``; None if the module runs whole


def patch_of(module: nn.Module) -> Patch | None:
    """Return the patch of a module, also under a class that another tool put over ours; None for a stock one."""
    return getattr(type(module), _PATCH, None)


def is_patched(module: nn.Module) -> bool:
    """Return whether the module's class is one of ours, or subclasses one."""
    return patch_of(module) is not None


def is_wrapped(module: nn.Module) -> bool:
    """Return whether another tool (such as FSDP2) has put a class of its own over ours."""
    return patch_of(module) is not None and _PATCH not in vars(type(module))


def stock_class(module: nn.Module) -> Any:
    """Return the class that the module has in stock."""
    patch = patch_of(module)
    return type(module) if patch is None else patch.stock


def patched_models(model: nn.Module) -> list[tuple[nn.Module, MemSaveConfig]]:
    """Return the outermost modules in ``model`` that run under a tape, each with the config that it is patched with."""
    found: list[tuple[nn.Module, MemSaveConfig]] = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        patch = patch_of(module)
        if patch is not None and patch.config is not None and not f"{name}.".startswith(inside):
            inside += (f"{name}." if name else "",)
            found.append((module, patch.config))
    return found


def hides_forward(module: nn.Module) -> bool:
    """Return whether a forward on the instance runs instead of the class's (Accelerate's hooks call the class's)."""
    own = module.__dict__.get("forward")
    if own is None or "_hf_hook" in module.__dict__ or _is_from_class(module, own):
        return False
    return not _is_ours(module.__dict__.get("_original_forward"))


def _is_from_class(module: nn.Module, method: Any) -> bool:
    return _is_ours(method) or getattr(method, "__func__", None) is stock_class(module).forward


def _is_ours(method: Any) -> bool:
    return getattr(method, "__func__", None) in _FORWARDS


def set_class(module: nn.Module, cls: Any) -> None:
    """Set the class of one module, to its stock class or one of ours."""
    module.__class__ = cls
    for name in ("forward", "_old_forward"):  # Accelerate's hooks bind the class's forward, and may leave it there
        if _is_from_class(module, module.__dict__.get(name)):
            setattr(module, name, types.MethodType(cls.forward, module))


#: Patch -> its class, as long as a module has it: equal patches share one type.
_CLASSES: weakref.WeakValueDictionary[Patch, Any] = weakref.WeakValueDictionary()


def patched_class(patch: Patch) -> Any:
    """Return the subclass of ``patch.stock`` that does what ``patch`` says; equal patches give the same one."""
    if (known := _CLASSES.get(patch)) is not None:
        return known
    stock, config, rung = patch.stock, patch.config, patch.rung

    @functools.wraps(stock.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # The current patch decides: Accelerate binds a forward to the instance, and calls it after the class changed.
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

    if config is not None and asks_for_index(config):  # so that Trainer passes that column to the model
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

    body: dict[str, Any] = {name: getattr(stock, name) for name in ("__module__", "__qualname__", "__doc__")}
    body |= {one.__name__: one for one in (__reduce_ex__, _replicate_for_data_parallel)}
    body[_PATCH] = patch
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
    return run_counted(tape, op.name, run, functools.partial(patch.stock.forward, self), args, self)


def _rebuild(patch: Patch) -> Any:
    """Make an empty module of the patched class, whose state ``copy.deepcopy`` or ``pickle`` sets next."""
    cls = patched_class(patch)
    return cls.__new__(cls)
