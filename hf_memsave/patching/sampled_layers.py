"""The name and the sampler of every sampled linear and attention of a patched model: set and removed."""

from __future__ import annotations

import re

from torch import nn

from hf_memsave.config.wtacrs import WTACRS
from hf_memsave.ops.sampled.sampler import Layer, Sampler
from hf_memsave.ops.sampled.wta_crs import LAYER
from hf_memsave.patching.swap import patch_of
from hf_memsave.patching.taped import SAMPLER

#: Prefixes that wrappers add to a path: a layer's name, by which it draws and caches norms, goes without them.
_WRAPPED = re.compile(r"^((base_model\.model|module|_orig_mod)\.)+")


def attach(model: nn.Module) -> None:
    """Give the sampled layers of ``model``, and no others, one sampler: an earlier one, if it has their config."""
    patches = {module: patch for module in model.modules() if (patch := patch_of(module)) is not None}
    configs = {module: patch.value for module, patch in patches.items() if isinstance(patch.value, WTACRS)}
    known = {m.__dict__[LAYER].sampler for m in configs if LAYER in m.__dict__}
    known |= {m.__dict__.pop(SAMPLER) for m in model.modules() if SAMPLER in m.__dict__}
    for module in model.modules():
        if module not in configs:
            module.__dict__.pop(LAYER, None)
    if not configs:
        return
    config = next(iter(configs.values()))
    sampler = next((s for s in known if s.config == config), None) or Sampler(config)
    for name, module in model.named_modules():
        if module in configs:
            before = module.__dict__.get(LAYER)
            layer = Layer(before.name if before is not None else _WRAPPED.sub("", name), sampler)
            if hasattr(module, "weight"):  # a linear: the draws of attention ask no cache
                sampler.cache.known.add(layer.name)
            module.__dict__[LAYER] = layer
        if module in patches and patches[module].config is not None:
            module.__dict__[SAMPLER] = sampler


def sampler_of(model: nn.Module) -> Sampler | None:
    """Return the sampler of the sampled layers in ``model``; None if there are none."""
    return next((m.__dict__[LAYER].sampler for m in model.modules() if LAYER in m.__dict__), None)
