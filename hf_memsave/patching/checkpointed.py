"""Blocks that run again as a whole, by Transformers' own gradient checkpointing of one layer."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hf_memsave.errors import KeptTensorChangedError

#: How ``gradient_checkpointing_enable`` tells a layer, too.
_NAMES = ("gradient_checkpointing", "_gradient_checkpointing_func")
#: Kinds of PEFT's adapters that are a cache.
_BRING_A_CACHE = ("PREFIX_TUNING", "CARTRIDGE")
#: What a layer of PEFT's keeps of which adapters it uses, and how.
_OF_ADAPTERS = ("_active_adapter", "_disable_adapters", "scaling")
#: Where a block finds what it was told before.
BEFORE = "_memsave_checkpointed"


class _Ours(partial[Any]):
    """The function by which a block checkpoints itself, to be told from what others set since."""


class _Flag:
    """True where a block is to run again: a cache is neither read nor written then, as in ``generate``."""

    def __bool__(self) -> bool:
        return torch.is_grad_enabled() and not getattr(_caches, "is_asked_for", False)


_caches = threading.local()


def _checkpoint(function: Any, *args: Any) -> Any:
    """``checkpoint`` of a block's ``__call__``, which refuses to run it again with other adapters than in its forward.

    Returns:
        What the block does.

    Raises:
        KeptTensorChangedError: In backward: adapters were switched since.
    """
    block = _block_of(function)
    if "peft" not in sys.modules or block is None:
        return checkpoint(function, *args, use_reentrant=False)
    before = _adapters(block)

    def run(*args: Any) -> Any:
        if _adapters(block) != before:
            raise KeptTensorChangedError(
                f"a checkpointed {type(block).__name__} runs again in backward, and its adapters were switched, scaled "
                "or disabled since its forward. Call backward() before, or use checkpoint='gate' or None."
            )
        return function(*args)

    return checkpoint(run, *args, use_reentrant=False)


def _block_of(function: Any) -> nn.Module | None:
    """The block of which Transformers has made ``partial(forward, block)``, or of its ``__call__``."""
    given = *getattr(function, "args", ()), getattr(getattr(function, "func", None), "__self__", None)
    return next((one for one in given if isinstance(one, nn.Module)), None)


def _adapters(block: nn.Module) -> list[str]:
    layers = (m for m in block.modules() if hasattr(type(m), "_active_adapter"))
    return [repr([getattr(layer, name, None) for name in _OF_ADAPTERS]) for layer in layers]


@contextlib.contextmanager
def with_cache(model: nn.Module, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Run no block again while ``model`` is called with these, if they ask for a cache or bring one (a prefix)."""
    cache = arguments.get("past_key_values")
    is_filled = cache is not None and (not hasattr(cache, "get_seq_length") or cache.get_seq_length() > 0)
    is_prefix = getattr(getattr(model, "active_peft_config", None), "peft_type", None) in _BRING_A_CACHE
    if not (is_filled or is_prefix or arguments.get("use_cache")):
        yield
        return
    before, _caches.is_asked_for = getattr(_caches, "is_asked_for", False), True
    try:
        yield
    finally:
        _caches.is_asked_for = before


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
            own.update(zip(_NAMES, (_Flag(), _Ours(_checkpoint)), strict=True))
