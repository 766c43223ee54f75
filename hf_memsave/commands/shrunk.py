"""Fewer layers of a model that is too large to be built with random weights and compared here."""

from __future__ import annotations

import psutil
import torch
from transformers import PreTrainedConfig

from hf_memsave.commands import CommandError
from hf_memsave.measure.layers import at_depth, depth_fields, period
from hf_memsave.measure.models import build_empty
from hf_memsave.sizes import GIB

#: Parameters that are compared without a question; drawing more takes minutes.
_MOST = 10**9
#: Weights, their gradients, and those of the three steps that are compared.
_COPIES = 5
#: A part of the free memory.
_SHARE = 0.7


def shrunk(name: str, config: PreTrainedConfig, dtype: torch.dtype, layers: int | None) -> tuple[PreTrainedConfig, str]:
    """The configuration itself where its model is small enough, else one of fewer layers of the same width.

    Returns:
        A configuration, and what to say of it; nothing where it is the model's own.

    Raises:
        CommandError: Not even the fewest layers fit.
    """
    fields = depth_fields(config)
    own = {field: getattr(config, field) for field in fields}
    if layers is not None:
        return at_depth(config, dict.fromkeys(fields, layers)), ""
    free = psutil.virtual_memory().available * _SHARE
    whole = _count(config)
    if whole <= _MOST and _bytes(whole, dtype) <= free:
        return config, ""
    every = period(config)
    for number in (max(2, every), every):
        few = at_depth(config, {field: min(number, full) for field, full in own.items()})
        if _bytes(found := _count(few), dtype) <= free:
            return few, (
                f"{name} has {whole / 1e6:,.0f} M parameters in {sum(own.values())} layers. Compared are "
                f"{number} layers of that width, {found / 1e6:,.0f} M; --layers N takes others."
            )
    raise CommandError(
        f"{name} has {whole / 1e6:,.0f} M parameters, and even {every} of its layers need "
        f"{_bytes(found, dtype) / GIB:.1f} GiB with what is compared: expected at most {free / GIB:.1f}. Use "
        "--dtype bf16, or name a config.json of less width."
    )


def _count(config: PreTrainedConfig) -> int:
    return int(sum(p.numel() for p in build_empty(config).parameters()))


def _bytes(parameters: int, dtype: torch.dtype) -> int:
    return parameters * dtype.itemsize * _COPIES
