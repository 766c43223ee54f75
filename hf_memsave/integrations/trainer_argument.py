"""``Trainer(model, args, ..., memsave=True)``, and every trainer built on it: the callback, added as one is made.

``Trainer.__init__`` takes the argument, and so does the ``__init__`` of each subclass, whether it was defined before or
comes later: that of one which lists all that it takes (TRL's do), and of one which takes any keyword, whether it hands
them on or not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from hf_memsave.config import MemSaveConfig, MemSaveLike
from hf_memsave.integrations.hooks import when_imported, wrap


def install() -> None:
    """Teach trainers the argument, once Transformers' Trainer is imported; does nothing the second time."""
    when_imported("transformers.trainer", _teach)


def _teach(module: Any) -> None:
    wrap(module.Trainer, "__init__", _with_memsave)
    _teach_subclasses(module.Trainer)
    wrap(module.Trainer, "__init_subclass__", lambda stock: _teaching(module.Trainer, stock))


def _teach_subclasses(cls: type[Any]) -> None:
    for subclass in cls.__subclasses__():
        _teach_subclass(subclass)
        _teach_subclasses(subclass)


def _teach_subclass(cls: type) -> None:
    """Teach the ``__init__`` that ``cls`` has, which may be that of a class to mix in."""
    owner = next(c for c in cls.__mro__ if "__init__" in vars(c))
    own = vars(owner)["__init__"]
    if isinstance(own, FunctionType) and "memsave" not in inspect.signature(own).parameters:
        wrap(owner, "__init__", _with_memsave)


def _teaching(trainer: type, stock: Callable[..., None] | None) -> Callable[..., None]:
    def __init_subclass__(cls: type, **kwargs: Any) -> None:
        if stock is None:
            super(trainer, cls).__init_subclass__(**kwargs)  # type: ignore[arg-type]
        else:
            stock(cls, **kwargs)
        _teach_subclass(cls)

    return __init_subclass__


def _with_memsave(stock: Callable[..., None]) -> Callable[..., None]:
    takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(stock).parameters.values())

    def __init__(self: Any, *args: Any, memsave: MemSaveLike | None = None, **kwargs: Any) -> None:
        config = MemSaveConfig.resolve(memsave, may_plan=True)  # a wrong name must not cost a download
        if takes_any and memsave is not None:  # to be read or handed on; what swallows it is made good for below
            kwargs["memsave"] = memsave
        stock(self, *args, **kwargs)
        if config is not None:
            config.callback().add_to(self)

    return __init__
