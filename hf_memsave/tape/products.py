"""Products: under autocast they convert their inputs inside C++, where no hook sees the source.

So stock keeps a copy of its input for every consumer, and one of every weight. Here the conversions are made before the
call, through autograd nodes as in stock, and nothing is kept but what they were made from. A product whose inner
dimension is as small as an adapter's rank costs about a memory pass, so it may be recomputed (DoRA), as are, below the
floor, linears that the configuration names. Heads of attention are then laid out before a product, not inside it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_memsave.device import is_autocast
from hf_memsave.tape.autocast import converted, low, own_cast
from hf_memsave.tape.functions import indexed, named, unrecorded
from hf_memsave.tape.parameters import gathers_of
from hf_memsave.tape.private import any_autocast
from hf_memsave.tape.recomputed import RecomputedProduct
from hf_memsave.tape.storage import MOST_WORK
from hf_memsave.tape.tape import MADE, Handler, Tape
from hf_memsave.tape.tensors import is_plain
from hf_memsave.tape.wrappers import parts_of

#: Largest inner dimension of a product that may be recomputed, and how many times wider its result has to be.
_THIN, _WIDER = 64, 8
#: Functions that recomputing one tensor may run, where products may be among them: all of a block, and some twice.
MOST_WORK_OF_A_BLOCK = 2048
#: Products that copy what is not laid out batch by batch (heads of attention, say): inside C++, unseen by the tape.
_MATMUL = {torch.matmul, Tensor.matmul, Tensor.__matmul__}
#: Products of each group of rows with a matrix of its own, which autocast does not convert.
_GROUPED = {*named(["grouped_mm", "_grouped_mm"], F, torch)}
_KEPT = (
    "hf_memsave: a linear that checkpoint= chose is in a sharding unit of its own below a block (FSDP1), whose weight "
    "is gone when it would run again, so its output is kept. Wrap whole blocks, or use FSDP2."
)


def product(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a matrix product: convert its arguments as autocast would, and record it if it may be recomputed."""
    if kwargs and kwargs.get("out") is not None:  # autocast converts nothing there
        return unrecorded(tape, func, args, kwargs)
    if tape.frame.head is not None and func is F.linear and len(args) > 1 and args[1] is tape.frame.head.weight:
        if (made := tape.frame.logits(tape.frame.head, *args, **kwargs)) is not None:
            return made
    given, given_by_name = args, kwargs
    is_converted = any_autocast() and func not in _GROUPED and _is_autocast((*args, *kwargs.values()))
    if is_converted and tape.is_innermost():
        args, kwargs = converted(partial(low, tape), args, kwargs)
    if tape.most_work > MOST_WORK and func in _MATMUL and not kwargs and all(is_plain(a) and a.dim() > 3 for a in args):
        is_seen = not any_autocast() or tape.is_innermost()  # else autocast converts inside, a leaf but once
        if is_seen and args[0].shape[:-2] == args[1].shape[:-2]:  # the copies are made before, where the tape sees them
            args = tuple([tape.call(Tensor.flatten, a, 0, -3).view(a.shape) for a in args])
    out = func(*args, **kwargs) if kwargs else func(*args)
    if tape.frame.recomputed and record_if_chosen(tape, out, func, given, given_by_name):
        return out
    if func is F.linear and len(args) > 1 and args[1].shape[-1] <= _THIN and is_thin(args[1]) and type(out) in MADE:
        gathers = gathers_of(tape, given[1:])
        if gathers is None or gathers:  # its parameters are copied now, or gathered then
            tape.record(out, RecomputedProduct(func, out.device.type, gathers or ()), given, given_by_name)
        elif not any_autocast() or tape.is_innermost():  # else its conversions are hidden
            args = tuple([own_cast(tape, a, made) for a, made in zip(given, args, strict=True)])
            kwargs = {name: own_cast(tape, given_by_name[name], made) for name, made in kwargs.items()}
            tape.record(out, func, args, kwargs)
    return out


def record_if_chosen(tape: Tape, out: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Record ``out`` to be recomputed if the frame names a weight among the arguments; return whether it was."""
    is_chosen = any(isinstance(a, Tensor) and _is_chosen(tape, a) for a in reversed(args))
    return is_chosen and record_recomputed(tape, out, func, args, kwargs)


def _is_chosen(tape: Tape, weight: Tensor) -> bool:
    """Return whether ``weight`` is one that the frame names, a view of it (one expert's), or gathered from it."""
    whole = weight if weight._base is None else weight._base
    for own, name in tape.frame.recomputed:
        if (found := own.get(name)) is weight or found is whole:
            return True
    content = tape.known(weight)
    again = content and (content.make if content.call is None else content.call.func)
    return type(again) is RecomputedProduct and again.func is Tensor.__getitem__


def gathered(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``x[index]``, where ``x`` may be all experts' weights, and ``index`` the ones that tokens ask for."""
    if not tape.frame.recomputed or not _is_chosen(tape, args[0]):
        return indexed(tape, func, args, kwargs)
    out = func(*args)
    return out if out._is_view() or record_recomputed(tape, out, func, args, kwargs) else out


def record_recomputed(tape: Tape, out: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Record ``out`` to be recomputed by ``func(*args, **kwargs)`` under the autocast of now; return whether it was."""
    parts, gathers = parts_of(out), gathers_of(tape, args)
    if gathers is None:
        warnings.warn(_KEPT, stacklevel=2)
        return False
    again = RecomputedProduct(func, out.device.type, gathers)
    is_wrapper = any(isinstance(a, Tensor) and not is_plain(a) for a in kwargs.values())
    given = again.arguments_for(args) if len(parts) == 1 and not is_wrapper else None
    if given is None:
        return False
    tape.most_work = MOST_WORK_OF_A_BLOCK
    tape.record(parts[0], again, given, kwargs)
    return True


def is_thin(weight: Tensor) -> bool:
    """Return whether the product of a linear ``[out, in]`` may be recomputed."""
    return weight.shape[-1] <= _THIN and weight.shape[0] >= _WIDER * weight.shape[-1]


def chain(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``torch.linalg.multi_dot``: convert the tensors of its list, a vector as a view, before autocast would."""
    if kwargs or not any_autocast() or not tape.is_innermost() or not _is_autocast(tuple(args[0])):
        return unrecorded(tape, func, args, kwargs)
    return func([low(tape, m if m.dim() == 2 else m.view_as(m)) for m in args[0]])


def _is_autocast(arguments: tuple[Any, ...]) -> bool:
    """Return whether autocast converts these: not where a class with its own functions (torchao's) is asked first."""
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    has_no_functions = (is_plain(a) or type(a).__torch_function__ is nn.Parameter.__torch_function__ for a in tensors)
    return bool(tensors) and is_autocast(tensors[0]) and all(has_no_functions)


def loss(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a loss of probabilities, in which codecs take more bits."""
    with tape.using(is_in_loss=True):
        return func(*args, **kwargs)


_PRODUCTS = "linear matmul mm bmm addmm baddbmm addbmm __matmul__ __rmatmul__".split()
SPECIAL: dict[Any, Handler] = {
    F.cross_entropy: loss,
    torch.linalg.multi_dot: chain,
    Tensor.__getitem__: gathered,
    **dict.fromkeys([*named(_PRODUCTS, F, torch, Tensor), *_GROUPED], product),
}
