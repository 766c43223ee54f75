"""Blocks that run again as a whole, by Transformers' own gradient checkpointing of one layer."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

#: How ``gradient_checkpointing_enable`` tells a layer, too.
_NAMES = ("gradient_checkpointing", "_gradient_checkpointing_func")
#: Where a block finds what it was told before.
BEFORE = "_memsave_checkpointed"


class _Ours(partial):
    """The function by which a block checkpoints itself, to be told from what others set since."""


def checkpoint_blocks(model: nn.Module, blocks: Collection[nn.Module]) -> None:
    """Have ``blocks`` of ``model`` keep their input alone, and all others what they kept without us."""
    for module in model.modules():
        before: dict[str, Any] | None = module.__dict__.pop(BEFORE, None)
        if before is not None and isinstance(module.__dict__.get(_NAMES[1]), _Ours):
            for name in _NAMES:
                module.__dict__.pop(name)
            module.__dict__.update(before)
    models = [m for m in model.modules() if isinstance(m, PreTrainedModel) and hasattr(m, _NAMES[0])]
    for module in [*blocks, *models] if blocks else ():  # a model asks its own flag whether to build a cache
        own = module.__dict__
        if not getattr(module, _NAMES[0], False):  # else the whole model is checkpointed already
            own[BEFORE] = {name: own[name] for name in _NAMES if name in own}
            own.update(zip(_NAMES, (True, _Ours(checkpoint, use_reentrant=False)), strict=True))
