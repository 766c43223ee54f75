"""``from_pretrained(..., memsave=True)`` and ``from_config(config, memsave=True)``, on every Auto and direct class.

Every way of loading a model ends in one of two class methods of ``PreTrainedModel``, which are wrapped; so are the Auto
classes' own: before anything is looked up or downloaded, they ask whether what is given can be meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import logging

from hf_memsave.config.config import MemSaveConfig, MemSaveLike
from hf_memsave.errors import ConfigError
from hf_memsave.integrations.hooks import wrap

logger = logging.get_logger(__name__)

_METHODS = ("from_pretrained", "_from_config")
_AUTO_METHODS = ("from_pretrained", "from_config")


def teach_models(modeling_utils: Any) -> None:
    """Teach ``PreTrainedModel`` the ``memsave`` argument."""
    for name in _METHODS:
        wrap(modeling_utils.PreTrainedModel, name, _with_memsave)


def teach_auto_classes(modeling_auto: Any) -> None:
    """Have the Auto classes check the argument."""
    for cls in auto_classes(modeling_auto):
        for name in filter(vars(cls).__contains__, _AUTO_METHODS):
            wrap(cls, name, _checked)


def auto_classes(modeling_auto: Any) -> Iterator[Any]:
    """The Auto classes of models. Each has its own copies of the methods, with a documentation of its own."""
    for value in vars(modeling_auto).values():
        if isinstance(value, type) and issubclass(value, modeling_auto._BaseAutoModelClass):
            yield value


def _checked(stock: Callable[..., Any]) -> Callable[..., Any]:
    def load(cls: Any, *args: Any, **kwargs: Any) -> Any:
        MemSaveConfig.resolve(kwargs.get("memsave"))
        return stock(cls, *args, **kwargs)

    return load


def _with_memsave(stock: Callable[..., Any]) -> Callable[..., Any]:
    def load(cls: Any, *args: Any, memsave: MemSaveLike | None = None, **kwargs: Any) -> Any:
        config = MemSaveConfig.resolve(memsave)  # a wrong name must not cost a download
        for given in (*args, kwargs.get("config")):
            if isinstance(given, PreTrainedConfig) and hasattr(given, "memsave"):
                raise ConfigError(
                    f"the model's own config ({type(given).__name__}) has an attribute 'memsave' = {given.memsave!r}, "
                    "in which Transformers buries the argument. Remove that key from its config.json."
                )
        loaded = stock(cls, *args, **kwargs)
        if config is not None:
            from hf_memsave.patching.patch import patch

            model = loaded[0] if isinstance(loaded, tuple) else loaded  # output_loading_info=True
            logger.info("%s", patch(model, config))
        return loaded

    return load
