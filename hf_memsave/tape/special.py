"""Functions that keep more than they should, or hide what they do: products under autocast, and SDPA.

Products under autocast convert their inputs inside C++, where no hook sees the source: stock keeps a private copy of
its input for every consumer, and one of every weight. Here the conversions are made before the call, through autograd
nodes as in stock, so that they have records, and nothing is kept but what they were made from.

SDPA keeps q, k, v and its output, and

    stock                                                    here
    a float mask per layer, made of a boolean one            one per forward, remade from the boolean one
    a whole fused qkv projection, pinned by v                v

A product whose inner dimension is as small as an adapter's rank costs about a memory pass: it may run again (DoRA).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_memsave.tape.functions import new
from hf_memsave.tape.hooks import Tape
from hf_memsave.tape.private import any_autocast, unversioned
from hf_memsave.tape.record import MARK, unexpanded

#: Inner dimensions of a product that may run again, and how many times wider its result has to be.
_THIN, _WIDER = 64, 8


def product(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A matrix product."""
    if any_autocast() and _is_autocast((*args, *kwargs.values())) and tape.is_innermost():
        args = tuple([_low(tape, a) for a in args])
        kwargs = {name: _low(tape, a) for name, a in kwargs.items()}
    out = func(*args, **kwargs) if kwargs else func(*args)
    if func is F.linear and type(out) is Tensor and len(args) > 1:
        inner = args[1].shape[-1]
        if inner <= _THIN and out.shape[-1] >= _WIDER * inner:
            tape.record(out, func, args, kwargs)
    return out


def _is_autocast(arguments: tuple[Any, ...]) -> bool:
    device = next((a.device.type for a in arguments if isinstance(a, Tensor)), None)
    return device is not None and torch.is_autocast_enabled(device)


def _low(tape: Tape, argument: Any) -> Any:
    return low(tape, argument) if isinstance(argument, Tensor) else argument


def low(tape: Tape, x: Tensor) -> Tensor:
    """``x`` as autocast would hand it to a product; as there, the conversion of a leaf is shared by all who need it."""
    dtype = torch.get_autocast_dtype(x.device.type)
    if x.dtype == dtype or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    is_shared = x.is_leaf and x.requires_grad and x.dtype == torch.float32 and not x._is_view()
    if not is_shared or not torch.is_autocast_cache_enabled():
        return tape.call(Tensor.to, x, dtype)
    key = id(x), dtype
    cast, _ = tape.root.casts.get(key, (None, None))
    known: Any = None if cast is None else getattr(cast.untyped_storage(), MARK)
    if cast is None or (known.tape is not tape and known.is_kept):
        cast = tape.call(Tensor.to, x, dtype)
        tape.root.casts[key] = cast, x
        return cast
    storage = cast.untyped_storage()
    if not storage.nbytes():  # emptied at the end of a block
        with torch.no_grad(), unversioned(cast):
            storage.resize_(cast.numel() * cast.itemsize)
            cast.copy_(x)
    if known.tape is not tape:
        tape.record(cast, Tensor.to, (x, dtype))
    return cast


def attention(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``F.scaled_dot_product_attention``."""
    if not tape.is_innermost():
        return func(*args, **kwargs)
    query, key, value, mask, rest = _arguments(*args, **kwargs)
    given = key, value
    if any_autocast() and torch.is_autocast_enabled(query.device.type):
        query, key, value = low(tape, query), _low_heads(tape, key), _low_heads(tape, value)
    if mask is not None:
        mask = _shared_mask(tape, mask, query.dtype)
    value = _unpinned(tape, value, (query, key))
    key = _unpinned(tape, key, (query, value))
    tape.is_in_attention = True
    try:
        return func(query, key, value, mask, **rest)
    finally:
        tape.is_in_attention = False
        for tensor in given:  # a cache may hold it for long: let go of what it was made from
            tape.release(tensor)


def _arguments(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    names = "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"
    rest = dict(zip(names, args, strict=False)) | kwargs
    return query, key, value, rest.pop("attn_mask", None), rest


def _low_heads(tape: Tape, x: Tensor) -> Tensor:
    """``x`` in low precision; where it is repeated for every query head, remade from what it was before, in that."""
    record = tape.record_of(x)
    once = record.args[0] if record is not None and record.func is Tensor.reshape and not record.is_weak else None
    out = low(tape, x)
    if isinstance(once, Tensor) and 0 in once.stride() and out is not x:
        expanded, shape = once.shape, x.shape
        tape.release(out)
        tape.record(out, _repeated, (unexpanded(once).detach().to(out.dtype), expanded, shape))
    return out


def _repeated(once: Tensor, expanded: torch.Size, shape: torch.Size) -> Tensor:
    return once.expand(expanded).reshape(shape)


def _shared_mask(tape: Tape, mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.requires_grad:
        return low(tape, mask) if mask.dtype != dtype else mask
    mask = _made_before(tape, mask)
    if mask.dtype == torch.bool:
        return _made_before(tape, tape.call(float_mask, mask, dtype))
    if mask.dtype != dtype:  # under autocast
        return _made_before(tape, low(tape, mask))
    return mask


def _made_before(tape: Tape, mask: Tensor) -> Tensor:
    """The same mask as an earlier layer made from the same tensors (such as a boolean mask, or T5's position bias)."""
    record = tape.record_of(mask)
    if record is None or record.func is None or record.is_kept:
        return mask
    made = tape.memo[_identity(tape, mask)][1]
    return made if made._version == mask._version else mask


def _identity(tape: Tape, argument: Any, depth: int = 4) -> Any:
    """Equal for arguments that hold the same numbers: the same tensor, or one made in the same way.

    The memo holds the first tensor of each identity: its address stays its own, also when its record is forgotten.

    Returns:
        A key of the memo.
    """
    if not isinstance(argument, Tensor):
        return argument if isinstance(argument, Hashable) else id(argument)
    geometry = argument.storage_offset(), argument.shape, argument.stride(), argument.dtype
    address = "address", id(argument.untyped_storage()), argument._version, *geometry
    if address in tape.memo:
        return tape.memo[address][0]
    record, identity = tape.record_of(argument), address
    if record is not None and record.func is not None and depth and not record.is_kept and record.is_of(argument):
        kwargs = (record.kwargs or {}).items()
        made = [_identity(tape, a, depth - 1) for a in (*record.args, *(value for _, value in kwargs))]
        identity = *geometry, record.func, *made, *(name for name, _ in kwargs)
    if identity not in tape.memo:
        tape.memo[identity] = tape.memo[address] = identity, argument
    return identity


def float_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What SDPA makes of a boolean mask by itself, in every layer."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _unpinned(tape: Tape, x: Tensor, others: tuple[Tensor, ...]) -> Tensor:
    """``x``, or a copy where x is a part of a larger tensor that nobody else needs (Phi-3's v in its fused qkv)."""
    storage = x.untyped_storage()
    if storage.nbytes() <= x.numel() * x.itemsize or tape.is_kept(x):
        return x
    used = {(t.storage_offset(), t.shape): t.numel() for t in (x, *others) if t.untyped_storage() is storage}
    return x if sum(used.values()) * x.itemsize >= storage.nbytes() else tape.call(Tensor.contiguous, x)


def loss(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A loss of probabilities: a codec must know."""
    before, tape.is_in_loss = tape.is_in_loss, True
    try:
        return func(*args, **kwargs)
    finally:
        tape.is_in_loss = before


SPECIAL = {
    F.cross_entropy: loss,
    F.scaled_dot_product_attention: attention,
    float_mask: new,
    **dict.fromkeys(
        (
            F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm,
            torch.bmm, Tensor.bmm, torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm, torch.addbmm,
            Tensor.addbmm,
        ),
        product,
    ),
}  # fmt: skip
