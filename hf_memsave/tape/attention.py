"""``F.scaled_dot_product_attention``: what it keeps beside q, k, v and its output.

stock                                                    here
a float mask per layer, made of a boolean one            one per forward, recomputed from the boolean one; stock's
                                                         for cuDNN before PyTorch 2.12, where False is no -inf
CUDA: a copy of it, if its rows are not 8 k elements     one per forward, with rows that are
a whole fused qkv projection, pinned by v                v
CPU: with dropout the probabilities, what dropout        the probabilities
multiplies them with and gives, q and k scaled
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import has_torch_function

from hf_memsave.device import HALVES, fills_finite, mask_multiple
from hf_memsave.tape.autocast import low
from hf_memsave.tape.handles import Handle
from hf_memsave.tape.private import any_autocast, is_cudnn, is_one_kernel, no_autocast, safe_softmax
from hf_memsave.tape.tape import Handler, Tape, new
from hf_memsave.tape.tensors import CONSTANT, is_plain, unexpanded


def attention(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``F.scaled_dot_product_attention``: share its mask among layers; keep k and v without larger tensors."""
    if not tape.is_innermost():
        return func(*args, **kwargs)
    query, key, value, mask, rest = _arguments(*args, **kwargs)
    given = key, value
    is_low = any_autocast() and torch.is_autocast_enabled(query.device.type)
    if is_low:
        value, key = _low_heads(tape, value), _low_heads(tape, key)  # in autocast's order
        query = low(tape, query)
    if mask is not None:
        of_stock = mask.dtype is torch.bool and fills_finite(query) and is_cudnn(query, key, value, mask, **rest)
        of_layer, mask = mask, mask if of_stock else _shared_mask(tape, mask, query.dtype, is_low)
        if tape.ledger is not None and mask.untyped_storage() is not of_layer.untyped_storage():
            tape.ledger.note_stock_copy(mask.untyped_storage())
    value = _unpinned(tape, value, (query, key))
    key = _unpinned(tape, key, (query, value))
    is_composed = _is_composed(query, key, value, mask, **rest)
    is_part = query.requires_grad and query.untyped_storage().nbytes() > query.numel() * query.itemsize
    held = _held_whole(tape, query) if is_part and is_one_kernel(query, key, value, mask, **rest) else None
    call = partial(_composed, tape) if is_composed else func
    try:
        with tape.using(is_in_attention=True):
            return call(query, key, value, mask, **rest)
    finally:
        del held
        for tensor in given:  # a cache may keep it for long: forget the call that made it
            tape.forget_call(tensor)


def _arguments(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
    rest = dict(zip(("dropout_p", "is_causal", "scale", "enable_gqa"), args, strict=False)) | kwargs
    return query, key, value, attn_mask, rest


def _is_composed(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float = 0.0, is_causal: bool = False,
    **rest: Any,
) -> bool:  # fmt: skip
    """Return whether SDPA runs as many functions here, a dropout among them, and refuses none of its arguments."""
    given = query, key, value
    if not 0 < dropout_p < 1 or not all(is_plain(x) and x.numel() for x in given):
        return False
    if has_torch_function((*given, mask)):  # another mode or subclass wants to see the call
        return False
    is_alike = query.dtype == key.dtype == value.dtype and query.dim() == key.dim() == value.dim() >= 3
    takes_mask = mask is None or (not is_causal and is_plain(mask) and mask.dtype in (query.dtype, torch.float32))
    has_groups = not rest.get("enable_gqa") or not any(query.shape[-3] % x.shape[-3] for x in (key, value))
    is_taken = is_alike and query.is_floating_point() and takes_mask and has_groups
    return is_taken and not is_one_kernel(query, key, value, mask, dropout_p, is_causal, **rest)


def _composed(
    tape: Tape, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Run the functions that SDPA calls where it is not one kernel, in its order, so that the tape sees each."""
    dtype = query.dtype
    with no_autocast():
        if dtype in HALVES and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
            query, key, value = (tape.call(Tensor.to, x, torch.float32) for x in (query, key, value))
        scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        factor = math.sqrt(-scale if scale < 0 else scale)
        query = tape.call(torch.mul, query, -factor if scale < 0 else factor)
        if is_causal:
            seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
            mask = float_mask(seen, query.dtype)
        if enable_gqa:
            heads = query.shape[-3]
            key, value = (
                x if x.shape[-3] == heads else tape.call(Tensor.repeat_interleave, x, heads // x.shape[-3], -3)
                for x in (key, value)
            )
        key = tape.call(torch.mul, key.transpose(-2, -1), factor)
        scores = _product(tape, query, key)
        del query, key
        if mask is not None:
            scores = scores.add_(mask)
        weights = safe_softmax(scores)
        del scores
        weights = tape.call(F.dropout, weights, dropout_p, True)
        return _product(tape, weights, value).to(dtype)


def _product(tape: Tape, *factors: Tensor) -> Tensor:
    """Return the matrix product of ``factors``, and forget the calls that made them: nothing else uses them."""
    batches = [_one_batch(tape, x) for x in factors]
    product: Tensor = tape.call(torch.matmul, *batches)
    for x in batches:
        tape.forget_call(x)
    return product


def _one_batch(tape: Tape, x: Tensor) -> Any:
    """Return ``x``, or the contiguous copy that ``torch.matmul`` would make of it inside C++, unseen by the tape."""
    try:
        x.view(-1, *x.shape[-2:])
    except (RuntimeError, ValueError):  # of fake tensors
        return tape.call(Tensor.contiguous, x)
    return x


def _low_heads(tape: Tape, x: Tensor) -> Tensor:
    """Return a key or value in autocast's dtype; one of repeated heads is recomputed from them, in that dtype."""
    once = _repeated_from(tape, x)
    out = low(tape, x)
    if once is not None and out is not x:
        tape.forget_call(out)
        tape.record(out, _repeated, (unexpanded(once).detach().to(out.dtype), once.shape, x.shape))
    return out


def _repeated_from(tape: Tape, x: Tensor) -> Tensor | None:
    """Return the expanded tensor that ``x`` is a copy of, if neither was written to since; else None."""
    call = tape.call_that_made(x, (Tensor.reshape,))
    if call is None or call.has_ghosts or not tape.content_of(x).is_of(x):
        return None
    once, version = call.seen[0]
    if 0 not in once.stride() or not x.is_contiguous() or x.numel() != once.numel():  # or x is a view of the copy
        return None
    source = tape.content_of(once)
    return once if once._version == version and source is not None and not source.is_unversioned else None


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
    """Return an earlier layer's mask from the same tensors (a boolean mask, T5's position bias), or this one."""
    content = tape.content_of(mask)
    if tape.call_that_made(mask) is None or content.is_kept or not content.is_of(mask):
        return mask
    _, made, version = tape.memo.get(_identity(tape, mask, mask._version), (None, mask, mask._version))
    theirs = tape.content_of(made)
    return mask if theirs is None or theirs.is_unversioned or made._version != version else made


def _identity(tape: Tape, x: Tensor, version: int, depth: int = 4) -> Any:
    """Return a key, equal for ``x`` at ``version`` and for tensors that the same calls made from the same tensors."""
    content = tape.content_of(x)
    if content is None or content.is_unversioned:
        return object()
    geometry = x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()
    is_its = content.version == version and content.dtype == x.dtype and not content.is_kept
    address = id(x.untyped_storage()), version, *geometry
    if address in tape.memo:
        return tape.memo[address][0]
    identity: Any = address
    if is_its and depth and (call := tape.call_that_made(x)) is not None:
        versions = {id(argument): seen for argument, seen in call.seen}
        kwargs = call.kwargs or {}
        made = [_same(tape, a, versions, depth - 1) for a in (*call.args, *kwargs.values())]
        identity = *geometry, call.func, *made, *kwargs
    if identity not in tape.memo:  # which keeps the first tensor of each identity, so that no other gets its address
        tape.memo[identity] = tape.memo[address] = identity, x, version
    return identity


def _same(tape: Tape, argument: Any, versions: dict[int, int], depth: int) -> Any:
    """Return a key, equal for arguments that were equal when their function was called."""
    if isinstance(argument, Tensor):
        version = versions.get(id(argument))
        return object() if version is None else _identity(tape, argument, version, depth)
    kind = type(argument)
    if isinstance(argument, (list, tuple)):
        return kind, *[_same(tape, a, versions, depth) for a in argument]
    return (kind, repr(argument)) if kind in CONSTANT else object()


def float_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the float mask (0 or -inf) that SDPA makes of a boolean one inside C++, in every layer."""
    zeros = _empty_mask(mask, dtype).zero_() if mask_multiple(mask) > 1 else torch.zeros_like(mask, dtype=dtype)
    return zeros.masked_fill_(mask.logical_not(), float("-inf"))


def laid_out(mask: Tensor) -> Tensor:
    """Return a copy of ``mask`` with rows so far apart as CUDA's kernels ask: of any other, each layer keeps a copy."""
    return _empty_mask(mask, mask.dtype).copy_(mask)


def _empty_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    length = mask.shape[-1]
    padded = -length % mask_multiple(mask)
    return mask.new_empty((*mask.shape[:-1], length + padded), dtype=dtype)[..., :length]


def _unpinned(tape: Tape, x: Tensor, others: tuple[Tensor, ...]) -> Tensor:
    """Return ``x``, or a copy if it is a part of a larger tensor that is not needed (Phi-3's v in its fused qkv)."""
    storage = x.untyped_storage()
    if storage.nbytes() <= x.numel() * x.itemsize or tape.is_kept(x):
        return x
    if all(other is x for other in others):  # copies would have its gradients summed in another order
        return x
    used = {(t.storage_offset(), t.shape): t.numel() for t in (x, *others) if t.untyped_storage() is storage}
    return x if sum(used.values()) * x.itemsize >= storage.nbytes() else tape.call(Tensor.contiguous, x)


def _held_whole(tape: Tape, query: Tensor) -> Handle | None:
    """Keep the fused projection that ``query`` is a part of, before SDPA asks for a k that a cache copied from it."""
    content: Any = tape.content_of(query) if tape.outer is None and tape.codec is None else None
    if not tape.owns(content) or tape.call_that_made(query) is not None or content.make is not None:
        return None
    return tape.keep_or_reuse(content, query.untyped_storage(), query)


ATTENTION: dict[Any, Handler] = {F.scaled_dot_product_attention: attention, float_mask: new, laid_out: new}
