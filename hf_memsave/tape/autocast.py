"""Autocast: conversions (to 16 bits or fp32) are made before the call that would make them inside, unseen by hooks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_memsave.device import HALVES, is_autocast
from hf_memsave.tape.content import contents_on
from hf_memsave.tape.private import any_autocast, autocast_cache, has_autocast, no_dispatch
from hf_memsave.tape.recomputed import AutocastState
from hf_memsave.tape.tape import Handler, Tape, new

#: Functions that autocast may run in fp32 (on CUDA; on CPU ``polar`` alone), by the ATen op that it converts for.
WIDENED = {
    "pow": ("pow", "square", "__pow__", "__rpow__"),
    **{name: (name,) for name in "rsqrt exp expm1 log log1p log2 log10 reciprocal cosh sinh tan erfinv".split()},
    **{name: (name,) for name in "softplus layer_norm rms_norm group_norm polar".split()},
    **{name: (name, f"arc{name[1:]}") for name in ("acos", "asin")},
}
#: Functions that convert inside and keep nothing of the conversion: one kernel of 16 bits with a result in fp32, say.
WIDENED_WITHIN = {
    "softmax": ("softmax", "softmin"),
    "log_softmax": ("log_softmax",),
    "linalg_vector_norm": ("normalize",),
    "reciprocal": ("__rdiv__", "__rtruediv__"),
    "pow": ("ldexp",),  # a composite of it in some versions
    "prelu": ("prelu",),  # to 16 bits, as products
}


def converted(convert: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments of a call, its tensors converted in autocast's order: from the last one to the first."""
    new_args = [convert(a) if isinstance(a, Tensor) else a for a in reversed(args)]
    return tuple(new_args[::-1]), {name: convert(a) if isinstance(a, Tensor) else a for name, a in kwargs.items()}


def widens(x: Tensor, name: str) -> bool:
    """Return whether autocast is on for the device of ``x``, and converts the arguments of ``aten::name`` there."""
    return has_autocast(name, x.device.type) and is_autocast(x)


def wide(name: str, is_within: bool) -> Handler:
    """Return a handler of a function that autocast may run in fp32: it records the conversions, if not made within."""

    def handler(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)] if any_autocast() else []
        if not tensors or not widens(tensors[0], name):
            return new(tape, func, args, kwargs)
        if is_within:  # recomputed under autocast: converted before, it would keep more, and maybe other bits
            return new(tape, func, args, kwargs, partial(AutocastState.now(tensors[0].device.type).run, func))

        def widened(x: Tensor) -> Tensor:
            return tape.call(Tensor.to, x, torch.float32) if x.dtype in HALVES else x

        args, kwargs = converted(widened, args, kwargs)
        return new(tape, func, args, kwargs)

    return handler


def low(tape: Tape, x: Tensor) -> Tensor:
    """Return ``x`` in autocast's dtype for products; a trained fp32 leaf's cast is shared, as in autocast's cache."""
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
    known = () if cast is None else tuple(contents_on(cast.untyped_storage()))
    if cast is None or any(content.owner is not tape.lock and content.is_kept for content in known):
        cast = tape.call(Tensor.to, x, dtype)
        casts[key] = cast, x
    elif not any(content.owner is tape.lock for content in known):
        tape.record(cast, Tensor.to, (x, dtype))
    return cast


def _casts(tape: Tape) -> dict[Any, tuple[Tensor, Tensor]]:
    """Return the shared casts of leaves; cleared where autocast has emptied its own cache within the forward."""
    root = tape.root
    if (alive := root.memo.get(autocast_cache)) is None or alive() is None:
        root.casts.clear()
        root.memo[autocast_cache] = autocast_cache()
    return root.casts


def own_cast(tape: Tape, given: Any, made: Any) -> Any:
    """Return a product's argument ``made`` to record: for a leaf's shared cast, which is emptied early, a new one."""
    if made is given or not (given.is_leaf and given.requires_grad):
        return made
    own = given.detach().to(made.dtype)
    tape.record(own, Tensor.to, (given, made.dtype))
    return own
