"""Patching of adapters that PEFT adds to a patched model, or by a config with ``memsave``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_memsave.config.config import MemSaveConfig
from hf_memsave.logs import logger
from hf_memsave.patching.blocks import block_at, block_numbers
from hf_memsave.patching.collect import collect
from hf_memsave.patching.patch import patch
from hf_memsave.patching.refusals import check
from hf_memsave.patching.sampled_layers import attach
from hf_memsave.patching.swap import is_patched, patch_of, patched_class, patched_models, set_class


def inject_adapter(stock: Callable[..., Any], tuner: Any, model: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Run PEFT's ``inject_adapter``, and patch what it adds as its config asks, or as the block around is patched."""
    memsave = getattr(tuner.peft_config[name], "memsave", None)
    asked = None if memsave is True and patched_models(model) else MemSaveConfig.resolve(memsave)
    if asked is not None:  # a model that cannot be patched is refused before PEFT touches it
        check(model, asked, collect(model, asked))
    result = stock(tuner, model, name, *args, **kwargs)
    if asked is not None:
        patch(model, asked)
        return result
    # Modules in adapters that are approximated or sampled take the config of the patched module around them.
    from peft.tuners.tuners_utils import BaseTunerLayer

    numbers = block_numbers(model)
    configs: dict[str, MemSaveConfig] = {}  # path, and a dot -> config
    for path, module in list(model.named_modules()):
        if (known := patch_of(module)) is not None and known.config is not None:
            configs[f"{path}." if path else ""] = known.config
        around = max(filter(f"{path}.".startswith, configs), key=len, default=None)
        if around is None or not isinstance(module, BaseTunerLayer):
            continue
        found = collect(module, configs[around], prefix=path, block=block_at(path, numbers) or 0)
        if found.errors:
            logger.warning("The adapter in %s stays as PEFT made it: %s", path, found.errors[0])
        for added, change in found.patches.items():
            if not (found.errors or is_patched(added)):
                set_class(added, patched_class(change))
    attach(model)
    return result
