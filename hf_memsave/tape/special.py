"""Functions that keep more than they should, or hide what they do: products under autocast.

Products under autocast convert their inputs inside C++, where no hook sees the source: stock keeps a private copy of
its input for every consumer, and one of every weight. Here the conversions are made before the call, through autograd
nodes as in stock, so that they have records, and nothing is kept but what they were made from.

A product whose inner dimension is as small as an adapter's rank costs about a memory pass: it may run again (DoRA).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_memsave.device import is_autocast
from hf_memsave.tape.again import LinearAgain, gathers_of, runs_again
from hf_memsave.tape.functions import unrecorded
from hf_memsave.tape.hooks import Tape
from hf_memsave.tape.private import FakeTensor, any_autocast, autocast_cache, no_dispatch
from hf_memsave.tape.record import MARK
from hf_memsave.tape.tensors import is_plain

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
    if tape.again and runs_again(tape, out, func, *given):
        return out
    if func is F.linear and len(args) > 1 and is_thin(args[1]) and (type(out) is Tensor or type(out) is FakeTensor):
        gathers = gathers_of(tape, given[0][1:])
        if gathers is None or gathers:  # its parameters are copied now, or gathered then
            tape.record(out, LinearAgain(func, out.device.type, gathers or ()), *given)
        elif not any_autocast() or tape.is_innermost():  # else its conversions are hidden
            args = tuple([_own(tape, a, made) for a, made in zip(given[0], args, strict=True)])
            kwargs = {name: _own(tape, given[1][name], made) for name, made in kwargs.items()}
            tape.record(out, func, args, kwargs)
    return out


def is_thin(weight: Tensor) -> bool:
    """Whether the product of a linear ``[out, in]`` may run again."""
    return weight.shape[-1] <= _THIN and weight.shape[0] >= _WIDER * weight.shape[-1]


def chain(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.linalg.multi_dot``: a product of what a list holds; a vector in it becomes a view first."""
    if kwargs or not any_autocast() or not tape.is_innermost() or not _is_autocast(tuple(args[0])):
        return unrecorded(tape, func, args, kwargs)
    return func([_low(tape, m if m.dim() == 2 else m.view_as(m)) for m in args[0]])


def _is_autocast(arguments: tuple[Any, ...]) -> bool:
    """Whether autocast converts these: a class with functions of its own (torchao's) is asked before it."""
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    return bool(tensors) and is_autocast(tensors[0]) and all(is_plain(a) or _is_seen_by_autocast(a) for a in tensors)


def _is_seen_by_autocast(tensor: Tensor) -> bool:
    return type(tensor).__torch_function__ is nn.Parameter.__torch_function__


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


def loss(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A loss of probabilities: a codec must know."""
    before, tape.is_in_loss = tape.is_in_loss, True
    try:
        return func(*args, **kwargs)
    finally:
        tape.is_in_loss = before


SPECIAL = {
    F.cross_entropy: loss,
    torch.linalg.multi_dot: chain,
    **dict.fromkeys(
        (
            F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm,
            torch.bmm, Tensor.bmm, torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm, torch.addbmm,
            Tensor.addbmm,
        ),
        product,
    ),
}  # fmt: skip
