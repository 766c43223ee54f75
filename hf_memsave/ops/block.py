"""``block``: puts a tape around a model or a checkpointed block, and keeps no KV cache while training.

Not an op on tensors: it is what makes the promises of all other ops count. Each ``GradientCheckpointingLayer`` gets
one too: under gradient checkpointing a foreign hook lies between it and the model's tape. Without, it does nothing.
Where linears are sampled, it tells their sampler which batch runs.
"""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn

from hf_memsave.ops.op import Binding, Op
from hf_memsave.sampling.sampler import INDEX, Sampler
from hf_memsave.tape import Tape

_CACHE = "use_cache"
#: Where a block finds the :class:`~hf_memsave.sampling.sampler.Sampler` of the sampled linears in it.
SAMPLER = "_memsave_sampler"
#: The argument by which a block that gradient checkpointing runs again knows the batch of its forward.
BATCH = "_memsave_batch"
#: Where a block finds the :class:`~hf_memsave.tape.storage.Codec` for what it has to keep, if that is to be coded.
CODEC = "_memsave_codec"


def _block(module: nn.Module, binding: Binding, *args: Any, **kwargs: Any) -> Any:
    stock = binding.stock.forward
    given = kwargs.pop(BATCH, None)
    index = kwargs.pop(INDEX, None) if asks_for_index(binding) else None
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return stock(module, *args, **kwargs)
    if module.training and kwargs.get(_CACHE) is None and kwargs.get("past_key_values") is None:
        position = _cache_position(binding.stock)
        if position is not None and len(args) <= position:
            # A cache nobody reads: Transformers switches it off too, under gradient checkpointing.
            kwargs[_CACHE] = False
    with entered(module, binding, args, kwargs, index, given):
        return stock(module, *args, **kwargs)


@contextlib.contextmanager
def entered(
    module: nn.Module, binding: Binding, args: Any, kwargs: Any, index: Any = None, given: Any = None
) -> Iterator[None]:
    """The forward of a block, or of a layer that was patched by itself: under a tape, and with its sampler told."""
    with _sampling(module, binding, args, kwargs, index, given), Tape(module.__dict__.get(CODEC)):
        yield


def asks_for_index(binding: Binding) -> bool:
    """Whether the model takes a column of sample indices, for the cache of its sampler."""
    linear = getattr(binding.value, "linear", None)
    return linear is not None and linear.cache == INDEX


def _sampling(module: nn.Module, binding: Binding, args: Any, kwargs: Any, index: Any, given: Any) -> Any:
    sampler: Sampler | None = module.__dict__.get(SAMPLER)
    if sampler is None or not module.training:
        return contextlib.nullcontext()
    arguments = dict(zip(_parameters(binding.stock)[1:], args, strict=False)) | kwargs
    if index is not None:
        arguments[INDEX] = index
    return sampler.entering(arguments, given)


def call_with_batch(stock: Any) -> Any:
    """``__call__`` of a block that may be checkpointed: what it is called with comes back when it is run again."""

    @functools.wraps(stock.__call__)
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        sampler: Sampler | None = self.__dict__.get(SAMPLER)
        if sampler is not None and not torch.compiler.is_compiling() and sampler.batch is not None:
            kwargs[BATCH] = sampler.batch
        return stock.__call__(self, *args, **kwargs)

    return __call__


@cache
def _parameters(cls: Any) -> list[str]:
    return list(inspect.signature(cls.forward).parameters)


@cache
def _cache_position(cls: Any) -> int | None:
    """Where ``use_cache`` stands among the positional arguments of ``forward`` (after self); None if it has none."""
    names = _parameters(cls)
    return names.index(_CACHE) - 1 if _CACHE in names else None


BLOCK = Op("block", None, _block, opens_tape=True)
