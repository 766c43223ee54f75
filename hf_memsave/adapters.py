"""Noticing that PEFT has added adapters to a model.

PEFT hands neither a config nor a layer the whole model. The one place where it has model and config together is
``BaseTuner.inject_adapter``: wrapping it is the only thing this package changes in PEFT.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

_MARK = "_memsave_stock"


def watch(added: Callable[[Any, Any], None]) -> None:
    """From now on PEFT calls ``added(model, config)`` once an adapter is in; does nothing the second time.

    Args:
        added: Takes the model that got the adapter, and the adapter's ``PeftConfig``.
    """
    tuners = sys.modules.get("peft.tuners.tuners_utils")  # importing PEFT takes seconds: not for those without it
    if tuners is None or hasattr(tuners.BaseTuner.inject_adapter, _MARK):
        return
    stock = tuners.BaseTuner.inject_adapter

    @functools.wraps(stock)
    def inject_adapter(self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, model, adapter_name, *args, **kwargs)
        added(model, self.peft_config[adapter_name])
        return result

    setattr(inject_adapter, _MARK, stock)
    tuners.BaseTuner.inject_adapter = inject_adapter
