"""Adapters that PEFT adds later to a patched model, or by a config of ours.

PEFT hands neither a config nor a layer the whole model. The one place where it has model and config together is
``BaseTuner.inject_adapter``: wrapping it is the only thing this package changes in PEFT.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.utils import logging

from hf_memsave.config.config import MemSaveConfig
from hf_memsave.errors import PatchError
from hf_memsave.integrations.hooks import when_imported, wrap
from hf_memsave.patching.blocks import block_numbers, number_of
from hf_memsave.patching.collect import collect
from hf_memsave.patching.refusals import refuse_another_config, refuse_foreign_patches
from hf_memsave.patching.sampled_layers import attach
from hf_memsave.patching.swap import is_patched, patch_of, patched_class, patched_models, set_class

logger = logging.get_logger(__name__)


def listen(patching: Any) -> None:
    """Have adapters patched that PEFT adds to a model whose config samples linears, or leaves adapters to stock."""
    if _when_patched not in patching.LISTENERS:
        patching.LISTENERS.append(_when_patched)


def _when_patched(config: MemSaveConfig) -> None:
    if config.linear is not None or config.lora == "stock" or config.first_blocks("lora") is not None:
        watch()


def watch() -> None:
    """From now on adapters are patched as PEFT adds them. Where PEFT is not imported yet, that waits until it is."""
    when_imported("peft.tuners.tuners_utils", _watch)


def _watch(tuners: Any) -> None:
    wrap(tuners.BaseTuner, "inject_adapter", _patching)


def _patching(stock: Callable[..., Any]) -> Callable[..., Any]:
    def inject_adapter(self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        from hf_memsave.patching.patch import patch  # not above: once it is imported, this module is asked to listen

        asked = _asked_for(model, self.peft_config[adapter_name])
        if asked is not None:  # a model that cannot be patched is refused before PEFT touches it
            refuse_foreign_patches(model)
            collect(model, asked)
            refuse_another_config(model, asked)
        result = stock(self, model, adapter_name, *args, **kwargs)
        if asked is not None:
            patch(model, asked)
        else:
            _patch_added(model)
        return result

    return inject_adapter


def _asked_for(model: nn.Module, config: Any) -> MemSaveConfig | None:
    """The ``memsave`` of a PEFT config of ours, unless it is plain True and the model is patched already."""
    memsave = getattr(config, "memsave", None)
    return None if memsave is True and patched_models(model) else MemSaveConfig.resolve(memsave)


def _patch_added(model: nn.Module) -> None:
    """Patch what is approximated or sampled in adapters, each with the config of the block it is in."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    numbers = block_numbers(model)
    configs: dict[str, MemSaveConfig] = {}  # path, and a dot -> config
    for name, module in list(model.named_modules()):
        if (known := patch_of(module)) is not None and known.config is not None:
            configs[f"{name}." if name else ""] = known.config
        around = max(filter(f"{name}.".startswith, configs), key=len, default=None)
        if around is None or not isinstance(module, BaseTunerLayer):
            continue
        try:
            plan = collect(module, configs[around], prefix=name, block=number_of(name, numbers))[1]
        except PatchError as error:
            logger.warning("The adapter in %s stays as PEFT made it: %s", name, error)
            continue
        for added, change in plan.items():
            if not is_patched(added):
                set_class(added, patched_class(change))
    attach(model)
