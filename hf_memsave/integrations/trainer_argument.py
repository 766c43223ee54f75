"""``Trainer(model, args, ..., memsave=True)``, and every trainer built on it: the callback, added as one is made.

``Trainer.__init__`` takes the argument, and with it each subclass that hands its keywords on; one that does not, as its
own ``__init__`` lists all that it takes (TRL's do) or drops the rest, is taught it, be it defined before or later.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

from hf_memsave.config.config import MemSaveConfig, MemSaveLike
from hf_memsave.integrations.hooks import wrap


def teach_trainers(module: Any) -> None:
    """Teach ``Trainer`` and its subclasses the ``memsave`` argument."""
    wrap(module.Trainer, "__init__", _with_memsave)
    _teach_subclasses(module.Trainer)
    wrap(module.Trainer, "__init_subclass__", partial(_teaching, module.Trainer))


def _teach_subclasses(cls: type[Any]) -> None:
    for subclass in cls.__subclasses__():
        _teach_subclass(subclass)
        _teach_subclasses(subclass)


def _teach_subclass(cls: type) -> None:
    own = vars(cls).get("__init__")
    if isinstance(own, FunctionType):
        taken = inspect.signature(own).parameters
        if "memsave" not in taken:
            hands_on = any(p.kind is p.VAR_KEYWORD for p in taken.values())
            wrap(cls, "__init__", partial(_with_memsave, hands_on=hands_on))


def _teaching(trainer: type, stock: Callable[..., None] | None) -> Callable[..., None]:
    def __init_subclass__(cls: type, **kwargs: Any) -> None:
        if stock is None:
            super(trainer, cls).__init_subclass__(**kwargs)  # type: ignore[arg-type]
        else:
            stock(cls, **kwargs)
        _teach_subclass(cls)

    return __init_subclass__


def _with_memsave(stock: Callable[..., None], hands_on: bool = False) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, memsave: MemSaveLike | None = None, **kwargs: Any) -> None:
        config = MemSaveConfig.resolve(memsave, may_plan=True)  # a wrong name must not cost a download
        handed_on = {"memsave": memsave} if hands_on and memsave is not None else {}
        stock(self, *args, **handed_on, **kwargs)
        if config is None:
            return
        ours, given = config.callback(), kwargs.get("callbacks") or ()
        there = [c for c in self.callback_handler.callbacks if type(c) is type(ours) and c not in given]
        if not handed_on or not there:  # else it has arrived, perhaps as another config
            ours.add_to(self)

    return __init__
