"""Wrappers around functions of other libraries' classes, put on when those are imported, and taken off again."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from hf_memsave.logs import logger

#: Attribute of each wrapper: itself (another wrapper may have copied its attributes) and the function it replaced.
_MARK = "_memsave_stock"
#: Class -> the names of its functions that are wrapped.
_WRAPPED: WeakKeyDictionary[type, set[str]] = WeakKeyDictionary()


def when_imported(name: str, teach: Callable[[Any], None]) -> None:
    """Call ``teach`` with the module ``name``: now if it is imported, else once it is, until :func:`uninstall`."""
    if name in sys.modules:
        teach(import_module(name))  # which waits where another thread is importing it
    elif not any(isinstance(finder, _WhenImported) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported(name, teach))


def wrap(owner: type, name: str, call: Callable[..., Any]) -> None:
    """Wrap the function ``name`` of class ``owner`` by ``call(stock, *args, **kwargs)``; do nothing the second time."""
    found = vars(owner).get(name)
    stock = getattr(found, "__func__", found)
    if hasattr(stock, _MARK):
        return

    def ours(*args: Any, **kwargs: Any) -> Any:
        return call(stock, *args, **kwargs)

    if stock is not None:  # else the class has nothing of this name, and gets a class method
        functools.update_wrapper(ours, stock)
    setattr(ours, _MARK, (ours, found))
    setattr(owner, name, ours if isinstance(found, FunctionType) else classmethod(ours))
    _WRAPPED.setdefault(owner, set()).add(name)


def uninstall() -> None:
    """Undo what importing hf_memsave changed in other libraries; do nothing the second time.

    Models that are patched stay so (:func:`hf_memsave.unpatch` is for them), and callbacks work on.
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _WhenImported)]
    for owner, names in list(_WRAPPED.items()):
        for name in names:
            there = getattr(vars(owner)[name], "__func__", vars(owner)[name])
            ours, stock = getattr(there, _MARK, (None, None))
            if ours is not there:
                logger.warning("Another tool has replaced %s.%s since: it stays as it is.", owner.__name__, name)
            elif stock is None:
                delattr(owner, name)
            else:
                setattr(owner, name, stock)
    _WRAPPED.clear()


class _WhenImported(MetaPathFinder):
    """An import finder that calls ``teach`` with the module ``name`` once it is imported, and removes itself."""

    def __init__(self, name: str, teach: Callable[[Any], None]) -> None:
        self.name, self.teach = name, teach

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Return the spec that the other finders give, with a loader that ends by calling ``teach``."""
        if fullname != self.name:
            return None
        others = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]  # old ones have none
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(self._run, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _run(self, exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
        exec_module(module)  # of a loader that modules may share, as in a zip file
        if module.__name__ == self.name and self in sys.meta_path:  # not after `uninstall`
            sys.meta_path.remove(self)
            self.teach(module)
