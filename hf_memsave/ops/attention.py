"""``attention``: stock SDPA attention, fed so that it keeps q, k, v and its output once, and nothing else.

Registered beside Transformers' own functions under the name ``"memsave"``; a patched model's config names it instead of
``"sdpa"``. Around a call of stock ``sdpa_attention_forward``::

    stock keeps                                            here
    k and v repeated for every query head (with a mask)    k and v; the repeated ones are promised
    a float mask per layer, made of a boolean one          one per forward
    SDPA's output, and its transposed copy                 the output, laid out so that no copy is needed
    a whole fused qkv projection, pinned by v              v
    T5's position bias plus mask, per layer                one per forward while the bias is frozen

Exact: the kernel sees the same numbers. Elsewhere (generation, compile, no gradients, paged caches) the stock function
runs. Flash attention is left alone; eager attention is :mod:`~hf_memsave.ops.eager_attention`.
"""

from collections.abc import Callable, Hashable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import (
    create_position_bias_mask,
    repeat_kv,
    sdpa_attention_forward,
    use_gqa_in_sdpa,
)
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from hf_memsave.ops.cast import is_autocast
from hf_memsave.tape import current, promise, promised
from hf_memsave.tape.storage import as_activation

NAME = "memsave"
STOCK_NAME = "sdpa"
_MEMO = "_memsave_memo"


def register() -> None:
    """Make :data:`NAME` known to Transformers, with SDPA's masks (without them padding would be dropped silently)."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface; q ``[batch, heads, seq, d]``, k and v ``[batch, kv_heads, kv_seq, d]``.

    Returns:
        The output ``[batch, seq, heads, d]``, and None for the weights.
    """
    options = dict(dropout=dropout, scaling=scaling, **kwargs)
    length, kv_length = query.shape[2], key.shape[2]
    is_cropped = position_bias is not None and attention_mask is None and kv_length > length
    if current() is None or cache is not None or length == 1 or is_cropped:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask,
            is_causal=is_causal, position_bias=position_bias, cache=cache, **options,
        )  # fmt: skip
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    dtype = torch.get_autocast_dtype(query.device.type) if is_autocast(query) else query.dtype

    if position_bias is not None:
        is_causal = is_causal and attention_mask is None
        attention_mask = _position_bias_mask(position_bias, attention_mask, is_causal, query, key, dtype)
        is_causal = False
    elif attention_mask is not None and attention_mask.dtype == torch.bool:
        attention_mask = _memo(attention_mask, dtype, lambda: _float_mask(attention_mask, dtype))

    query, value, key = _transposed(query), _unpinned(value, query), _unpinned(key, query)
    groups = getattr(module, "num_key_value_groups", 1)
    if groups > 1 and not use_gqa_in_sdpa(attention_mask, key, value):
        key, value = _repeated(key, groups, dtype), _repeated(value, groups, dtype)
        module = SimpleNamespace(is_causal=is_causal)  # the stock function must not repeat them again
    return sdpa_attention_forward(module, query, key, value, attention_mask, is_causal=is_causal, **options)


def _repeated(x: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """``repeat_kv(x, groups)`` in SDPA's dtype, promised from ``x`` in that dtype, through stock's autograd nodes."""
    repeat = partial(repeat_kv, n_rep=groups)
    if x.dtype == dtype:
        return promised(repeat, x)
    return promise(repeat(x).to(dtype), repeat, as_activation(x.detach().to(dtype)))


def _transposed(query: Tensor) -> Tensor:
    """The same q, in memory as ``[batch, seq, heads, d]``: SDPA lays its output out like q, and o_proj wants that."""
    if query.is_contiguous() and query.shape[1] > 1:
        return query.transpose(1, 2).contiguous().transpose(1, 2)
    return query


def _unpinned(x: Tensor, query: Tensor) -> Tensor:
    """``x``, or a copy where x is a part of a larger tensor that nobody else needs (Phi-3's v in its fused qkv)."""
    storage = x.untyped_storage()
    if storage.nbytes() <= x.numel() * x.itemsize or storage._cdata == query.untyped_storage()._cdata:
        return x
    return x.contiguous()


def _float_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What SDPA makes of a boolean mask by itself, in every layer."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _position_bias_mask(
    position_bias: Tensor, mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor, dtype: torch.dtype
) -> Tensor:
    """T5's additive mask ``[batch or 1, heads, seq, kv_seq]``."""
    # create_position_bias_mask asks its q and k for their dtype, device and lengths: give it those without their bytes.
    q, k = (torch.empty(1, dtype=t.dtype, device=t.device).expand(t.shape) for t in (query, key))
    if position_bias.requires_grad or (mask is not None and mask.requires_grad):
        # Layers must not share the autograd node: their gradients would be added before the mask's own sum.
        inputs = (position_bias,) if mask is None else (position_bias, mask)
        return promised(lambda b, m=None: create_position_bias_mask(b, m, is_causal, q, k), *inputs)
    if mask is not None and mask.is_inference():
        return create_position_bias_mask(position_bias, mask, is_causal, q, k).to(dtype)
    of_mask = None if mask is None else (mask.untyped_storage()._cdata, mask._version, mask.shape, mask.stride())
    return _memo(
        position_bias,
        (of_mask, is_causal, dtype, key.dtype, query.shape[2], key.shape[2]),
        lambda: create_position_bias_mask(position_bias, mask, is_causal, q, k).to(dtype),
        mask,
    )


def _memo(owner: Tensor, key: Hashable, make: Callable[[], Tensor], *held: Tensor | None) -> Tensor:
    """``make()``, once per state of ``owner``; the result lives as long as the storage of ``owner``.

    Args:
        owner: The tensor it is made from.
        key: What else it depends on.
        make: Makes it.
        *held: Tensors whose addresses the key names: held with the result, so that no other can take their place.

    Returns:
        The result, or one made before.
    """
    if owner.is_inference():  # no version counter, so no telling whether it changed
        return make()
    storage = owner.untyped_storage()
    memo = getattr(storage, _MEMO, {})
    full = (key, owner._version, owner.shape, owner.stride(), owner.storage_offset())
    if full not in memo:
        made = make()
        if made.untyped_storage()._cdata == storage._cdata:  # the owner itself, which must not own itself
            return made
        memo[full] = (made, held)
        setattr(storage, _MEMO, memo)
    return memo[full][0]
