"""Adapters that PEFT adds later to a patched model, or by a config of ours.

PEFT hands neither a config nor a layer the whole model. The one place where it has model and config together is
``BaseTuner.inject_adapter``: wrapping it is the only thing this package changes in PEFT.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.utils import logging

from hf_memsave.arch import adapter
from hf_memsave.blocks import block_numbers, number_of
from hf_memsave.collect import BLOCKS, collect, refuse_foreign_patches
from hf_memsave.config import MemSaveConfig
from hf_memsave.errors import PatchError
from hf_memsave.sampled_layers import attach
from hf_memsave.swap import binding_of, is_patched, patched_class, patched_models, set_class, stock_class

logger = logging.get_logger(__name__)

_MARK = "_memsave_stock"


def watch(patch: Callable[..., Any]) -> None:
    """From now on adapters are patched as PEFT adds them; does nothing without PEFT, or the second time.

    Args:
        patch: ``patch(model, config)``, for a PEFT config whose ``memsave`` asks for it.
    """
    try:
        from peft.tuners.tuners_utils import BaseTuner
    except ImportError:
        return
    if hasattr(stock := BaseTuner.inject_adapter, _MARK):
        return

    @functools.wraps(stock)
    def inject_adapter(self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        asked = _asked_for(model, self.peft_config[adapter_name])
        if asked is not None:  # a model that cannot be patched is refused before PEFT touches it
            refuse_foreign_patches(model)
            collect(model, asked)
        result = stock(self, model, adapter_name, *args, **kwargs)
        if asked is not None:
            patch(model, asked)
        else:
            _patch_added(model)
        return result

    setattr(inject_adapter, _MARK, stock)
    BaseTuner.inject_adapter = inject_adapter


def _asked_for(model: nn.Module, config: Any) -> MemSaveConfig | None:
    """The ``memsave`` of a PEFT config of ours, unless it is plain True and the model is patched already."""
    memsave = getattr(config, "memsave", None)
    return None if memsave is True and patched_models(model) else MemSaveConfig.resolve(memsave)


def _patch_added(model: nn.Module) -> None:
    """Patch the stock modules of adapters, each with the config of the block it is in; what is stock there stays."""
    numbers = block_numbers(model)
    blocks: dict[str, Any] = {}  # path, and a dot -> config; None for a stock one
    for name, module in model.named_modules():
        binding = binding_of(module)
        if isinstance(module, BLOCKS) or (binding is not None and binding.tape_config is not None):
            blocks[f"{name}." if name else ""] = None if binding is None else binding.tape_config
        if adapter(stock_class(module)) is None:
            continue
        around = max(filter(f"{name}.".startswith, blocks), key=len, default=None)
        if around is None or (config := blocks[around]) is None:
            continue
        try:
            plan = collect(module, config, prefix=name, block=number_of(name, numbers))[1]
        except PatchError as error:
            logger.warning("The adapter in %s stays as PEFT made it: %s", name, error)
            continue
        for p in plan:
            if not is_patched(p.module):
                set_class(p.module, patched_class(stock_class(p.module), p.site.op, p.site.names, p.value))
    attach(model)
