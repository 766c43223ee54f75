"""Functions that keep more than they should, or hide what they do: products under autocast, and SDPA.

Products under autocast convert their inputs inside C++, where no hook sees the source: stock keeps a private copy of
its input for every consumer, and one of every weight. Here the conversions are made before the call, through autograd
nodes as in stock, so that they have records, and nothing is kept but what they were made from.

SDPA keeps q, k, v and its output, and

    stock                                                    here
    a float mask per layer, made of a boolean one            one per forward, remade from the boolean one
    CUDA: a copy of it, if its rows are not 8 k elements     one per forward, with rows that are
    a whole fused qkv projection, pinned by v                v

A product whose inner dimension is as small as an adapter's rank costs about a memory pass: it may run again (DoRA).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_memsave.device import mask_multiple
from hf_memsave.tape.functions import new, unrecorded
from hf_memsave.tape.hooks import Tape
from hf_memsave.tape.private import FakeTensor, any_autocast, autocast_cache, no_dispatch
from hf_memsave.tape.record import MARK
from hf_memsave.tape.tensors import unexpanded

#: Inner dimensions of a product that may run again, and how many times wider its result has to be.
_THIN, _WIDER = 64, 8


def product(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A matrix product."""
    if kwargs and kwargs.get("out") is not None:  # autocast converts nothing there
        return unrecorded(tape, func, args, kwargs)
    if tape.head is not None and func is F.linear and len(args) > 1 and args[1] is tape.head.weight:
        made = tape.logits(tape.head, *args, **kwargs)
        if made is not None:
            return made
    given = args, kwargs
    if any_autocast() and _is_autocast((*args, *kwargs.values())) and tape.is_innermost():
        args = tuple([_low(tape, a) for a in reversed(args)][::-1])  # in the order of autocast's own conversions
        kwargs = {name: _low(tape, a) for name, a in kwargs.items()}
    out = func(*args, **kwargs) if kwargs else func(*args)
    if func is F.linear and len(args) > 1 and (type(out) is Tensor or type(out) is FakeTensor):
        inner = args[1].shape[-1]
        is_thin = inner <= _THIN and out.shape[-1] >= _WIDER * inner
        if is_thin and (not any_autocast() or tape.is_innermost()):  # else its conversions are hidden
            args = tuple([_own(tape, a, made) for a, made in zip(given[0], args, strict=True)])
            kwargs = {name: _own(tape, given[1][name], made) for name, made in kwargs.items()}
            tape.record(out, func, args, kwargs)
    return out


def chain(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.linalg.multi_dot``: a product of what a list holds; a vector in it becomes a view first."""
    if kwargs or not any_autocast() or not tape.is_innermost() or not _is_autocast(tuple(args[0])):
        return unrecorded(tape, func, args, kwargs)
    return func([_low(tape, m if m.dim() == 2 else m.view_as(m)) for m in args[0]])


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
    casts, key = _casts(tape), (id(x), dtype)
    cast, _ = casts.get(key, (None, None))
    if cast is not None and cast.shape != x.shape:  # emptied at the end of a block
        with torch.no_grad(), no_dispatch():
            cast.data = x.to(dtype)
        tape.record(cast, Tensor.to, (x, dtype))
        return cast
    known: Any = None if cast is None else getattr(cast.untyped_storage(), MARK, None)
    if cast is None or (known is not None and known.tape is not tape and known.is_kept):
        cast = tape.call(Tensor.to, x, dtype)
        casts[key] = cast, x
    elif known is None or known.tape is not tape:
        tape.record(cast, Tensor.to, (x, dtype))
    return cast


def _casts(tape: Tape) -> dict[Any, tuple[Tensor, Tensor]]:
    """The shared conversions; none any more where autocast has let go of its own since, within the forward."""
    root = tape.root
    if (alive := root.memo.get(autocast_cache)) is None or alive() is None:
        root.casts.clear()
        root.memo[autocast_cache] = autocast_cache()
    return root.casts


def _own(tape: Tape, given: Any, made: Any) -> Any:
    """An argument of a product, to be recorded: the shared conversion of a leaf is emptied too early."""
    if made is given or not (given.is_leaf and given.requires_grad):
        return made
    own = given.detach().to(made.dtype)
    tape.record(own, Tensor.to, (given, made.dtype))
    return own


def attention(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``F.scaled_dot_product_attention``."""
    if not tape.is_innermost():
        return func(*args, **kwargs)
    query, key, value, mask, rest = _arguments(*args, **kwargs)
    given = key, value
    is_low = any_autocast() and torch.is_autocast_enabled(query.device.type)
    if is_low:
        value, key = _low_heads(tape, value), _low_heads(tape, key)  # in autocast's order
        query = low(tape, query)
    if mask is not None:
        mask = _shared_mask(tape, mask, query.dtype, is_low)
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
    once = _repeated_from(tape, x)
    out = low(tape, x)
    if once is not None and out is not x:
        expanded, shape = once.shape, x.shape
        tape.release(out)
        tape.record(out, _repeated, (unexpanded(once).detach().to(out.dtype), expanded, shape))
    return out


def _repeated_from(tape: Tape, x: Tensor) -> Tensor | None:
    """The expanded tensor that ``x`` is a copy of, where nobody has written to either."""
    record = tape.record_of(x)
    if record is None or record.func is not Tensor.reshape or record.is_weak or not record.is_of(x):
        return None
    tape.asked.add(record.made)
    once, version = record.seen[0]
    if 0 not in once.stride() or not x.is_contiguous() or x.numel() != once.numel():  # or x is a view of the copy
        return None
    source = tape.record_of(once)
    return once if once._version == version and source is not None and not source.is_distrusted else None


def _repeated(once: Tensor, expanded: torch.Size, shape: torch.Size) -> Tensor:
    return once.expand(expanded).reshape(shape)


def _shared_mask(tape: Tape, mask: Tensor, dtype: torch.dtype, is_low: bool) -> Tensor:
    if mask.requires_grad:
        return low(tape, mask) if is_low else mask
    mask = _made_before(tape, mask)
    if mask.dtype == torch.bool:
        return _made_before(tape, tape.call(float_mask, mask, dtype))
    if is_low:
        mask = _made_before(tape, low(tape, mask))
    multiple = mask_multiple(mask)
    is_laid = mask.stride(-1) == 1 and not any(stride % multiple for stride in mask.stride()[:-1])
    return mask if multiple == 1 or is_laid else _made_before(tape, tape.call(laid_out, mask))


def _made_before(tape: Tape, mask: Tensor) -> Tensor:
    """The same mask as an earlier layer made from the same tensors (such as a boolean mask, or T5's position bias)."""
    record = tape.record_of(mask)
    if record is None or record.func is None or record.is_kept or not record.is_of(mask):
        return mask
    tape.asked.add(record.made)
    _, made, version = tape.memo.get(_identity(tape, mask, mask._version), (None, mask, mask._version))
    theirs = tape.record_of(made)
    return mask if theirs is None or theirs.is_distrusted or made._version != version else made


def _identity(tape: Tape, x: Tensor, version: int, depth: int = 4) -> Any:
    """Equal for tensors that held the same numbers at this version: the same tensor, or one made in the same way.

    The memo holds the first tensor of each identity: its address stays its own, also when its record is forgotten.

    Returns:
        A key of the memo.
    """
    record = tape.record_of(x)
    if record is None or record.is_distrusted:
        return object()
    geometry = x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()
    is_its = record.version == version and record.dtype == x.dtype and not record.is_kept
    address = id(x.untyped_storage()), version, *geometry
    if address in tape.memo:
        return tape.memo[address][0]
    identity: Any = address
    if record.func is not None and is_its and depth:
        tape.asked.add(record.made)
        versions = {id(argument): seen for argument, seen in record.seen}
        kwargs = record.kwargs or {}
        made = [_same(tape, a, versions, depth - 1) for a in (*record.args, *kwargs.values())]
        identity = *geometry, record.func, *made, *kwargs
    if identity not in tape.memo:
        tape.memo[identity] = tape.memo[address] = identity, x, version
    return identity


#: Arguments that say all by their value.
_VALUES = frozenset({int, bool, str, type(None), type(...), torch.dtype, torch.device, torch.memory_format})


def _same(tape: Tape, argument: Any, versions: dict[int, int], depth: int) -> Any:
    """Equal for equal arguments of one function, of tensors as they were when it was called."""
    if isinstance(argument, Tensor):
        version = versions.get(id(argument))
        return object() if version is None else _identity(tape, argument, version, depth)
    kind = type(argument)
    if isinstance(argument, (list, tuple)):
        return kind, *[_same(tape, a, versions, depth) for a in argument]
    if kind is slice:
        return kind, *[_same(tape, a, versions, depth) for a in (argument.start, argument.stop, argument.step)]
    if kind is float:
        return argument.hex()
    return (kind, argument) if kind in _VALUES else object()


def float_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What SDPA makes of a boolean mask by itself, in every layer."""
    zeros = _empty_mask(mask, dtype).zero_() if mask_multiple(mask) > 1 else torch.zeros_like(mask, dtype=dtype)
    return zeros.masked_fill_(mask.logical_not(), float("-inf"))


def laid_out(mask: Tensor) -> Tensor:
    """``mask``, its rows so far apart as CUDA's kernels ask for: of any other, each layer makes and keeps a copy."""
    return _empty_mask(mask, mask.dtype).copy_(mask)


def _empty_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    length = mask.shape[-1]
    padded = -length % mask_multiple(mask)
    return mask.new_empty((*mask.shape[:-1], length + padded), dtype=dtype)[..., :length]


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
    torch.linalg.multi_dot: chain,
    float_mask: new,
    laid_out: new,
    **dict.fromkeys(
        (
            F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm,
            torch.bmm, Tensor.bmm, torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm, torch.addbmm,
            Tensor.addbmm,
        ),
        product,
    ),
}  # fmt: skip
