"""``block``: puts a tape around a model or a checkpointed block, and keeps no KV cache while training.

Not an op on tensors: it is what makes the promises of all other ops count. Each ``GradientCheckpointingLayer`` gets
one too: under gradient checkpointing a foreign hook lies between it and the model's tape. Without, it does nothing.
"""

import inspect
from functools import cache
from typing import Any

import torch
from torch import nn

from hf_memsave.ops.op import Binding, Op
from hf_memsave.tape import Tape

_CACHE = "use_cache"


def _block(module: nn.Module, binding: Binding, *args: Any, **kwargs: Any) -> Any:
    stock = binding.stock.forward
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return stock(module, *args, **kwargs)
    if module.training and kwargs.get(_CACHE) is None and kwargs.get("past_key_values") is None:
        position = _cache_position(binding.stock)
        if position is not None and len(args) <= position:
            # A cache nobody reads: Transformers switches it off too, under gradient checkpointing.
            kwargs[_CACHE] = False
    with Tape():
        return stock(module, *args, **kwargs)


@cache
def _cache_position(cls: Any) -> int | None:
    """Where ``use_cache`` stands among the positional arguments of ``forward`` (after self); None if it has none."""
    names = list(inspect.signature(cls.forward).parameters)
    return names.index(_CACHE) - 1 if _CACHE in names else None


BLOCK = Op("block", None, _block, opens_tape=True)
