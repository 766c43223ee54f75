"""``from_pretrained(..., memsave=True)`` and ``from_config(config, memsave=True)``, on every Auto and direct class.

Every way of loading a model ends in one of two class methods of ``PreTrainedModel``. Wrapping those two is the
only thing this package changes in Transformers itself, but for the Auto classes' own: before anything is looked up or
downloaded, they ask whether what is given here can be meant.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.utils import logging

from hf_memsave.config import MemSaveConfig, MemSaveLike
from hf_memsave.errors import ConfigError
from hf_memsave.patching.patch import patch

logger = logging.get_logger(__name__)

_METHODS = ("from_pretrained", "_from_config")
_AUTO_METHODS = ("from_pretrained", "from_config")
_MARK = "_memsave_stock"
#: A part of the letters: an argument that has more of them in common with "memsave" is taken for a misspelling.
_ALIKE = 0.8


def install() -> None:
    """Teach ``PreTrainedModel`` the ``memsave`` argument; does nothing the second time."""
    for name in _METHODS:
        stock = getattr(PreTrainedModel, name).__func__
        if not hasattr(stock, _MARK):
            setattr(PreTrainedModel, name, classmethod(_with_memsave(stock)))
    for cls in auto_classes():
        for name in _AUTO_METHODS:
            method = vars(cls).get(name)
            if method is not None and not hasattr(method.__func__, _MARK):
                setattr(cls, name, classmethod(_checked(method.__func__)))


def auto_classes() -> Iterator[Any]:
    """The Auto classes of models. Each has its own copies of the methods, with a documentation of its own."""
    yield _BaseAutoModelClass
    for value in vars(modeling_auto).values():
        if isinstance(value, type) and issubclass(value, _BaseAutoModelClass):
            yield value


def _checked(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def load(cls: Any, *args: Any, **kwargs: Any) -> Any:
        _check(stock.__name__, kwargs)
        return stock(cls, *args, **kwargs)

    setattr(load, _MARK, stock)
    return load


def _check(method: str, kwargs: dict[str, Any]) -> MemSaveConfig | None:
    """What ``memsave`` asks for.

    Returns:
        The config, or None for stock.

    Raises:
        ConfigError: Nothing that exists; or it is misspelt itself.
    """
    for name in kwargs:
        letters = name.lower().replace("_", "")
        if name != "memsave" and SequenceMatcher(None, letters, "memsave").ratio() > _ALIKE:
            raise ConfigError(
                f"{method}({name}={kwargs[name]!r}): expected 'memsave', got {name!r}. Use memsave={kwargs[name]!r}."
            )
    return MemSaveConfig.resolve(kwargs.get("memsave"))


def _with_memsave(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def load(
        cls: type[PreTrainedModel],
        *args: Any,
        memsave: MemSaveLike | None = None,
        **kwargs: Any,
    ) -> Any:
        config = _check(stock.__name__, {**kwargs, "memsave": memsave})  # a wrong name must not cost a download
        for given in (*args, kwargs.get("config")):
            if isinstance(given, PreTrainedConfig) and hasattr(given, "memsave"):
                raise ConfigError(
                    f"the model's own config ({type(given).__name__}) has an attribute 'memsave' = {given.memsave!r}, "
                    "in which Transformers buries the argument. Remove that key from its config.json."
                )
        loaded = stock(cls, *args, **kwargs)
        if config is not None:
            model = loaded[0] if isinstance(loaded, tuple) else loaded  # output_loading_info=True
            logger.info("%s", patch(model, config))
        return loaded

    setattr(load, _MARK, stock)
    return load
