"""``from_pretrained(..., memsave=True)`` and ``from_config(config, memsave=True)``, on every Auto and direct class.

Every way of loading a model ends in one of two class methods of ``PreTrainedModel``. Wrapping those two is the
only thing this package changes in Transformers itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from hf_memsave.config import MemSaveConfig
from hf_memsave.errors import ConfigError
from hf_memsave.patching.patch import patch

logger = logging.get_logger(__name__)

_METHODS = ("from_pretrained", "_from_config")
_MARK = "_memsave_stock"


def install() -> None:
    """Teach ``PreTrainedModel`` the ``memsave`` argument; does nothing the second time."""
    for name in _METHODS:
        stock = getattr(PreTrainedModel, name).__func__
        if not hasattr(stock, _MARK):
            setattr(PreTrainedModel, name, classmethod(_with_memsave(stock)))


def _with_memsave(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def load(
        cls: type[PreTrainedModel],
        *args: Any,
        memsave: MemSaveConfig | str | bool | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        config = MemSaveConfig.resolve(memsave)  # a wrong name must not cost a download
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
