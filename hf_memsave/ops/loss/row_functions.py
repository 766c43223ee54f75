"""Functions of each row of logits, in the spellings that people use: what stays lazy, and what is asked of the rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_memsave.ops.loss.by_row import Asked
from hf_memsave.ops.loss.head import Step, followed
from hf_memsave.tape.again import AutocastState, run_under
from hf_memsave.tape.private import no_modes, tree_leaves


def named(names: str) -> dict[Any, str]:
    """The functions of these names in PyTorch, each with its own."""
    homes = (torch, Tensor, F)
    return {getattr(home, name): name for name in names.split() for home in homes if hasattr(home, name)}


_ALONE = named("exp log add sub __rsub__").keys()
_OVER_WORDS = named("log_softmax softmax")
_REDUCED = named("gather take_along_dim logsumexp sum mean max amax argmax topk all")
_OF_BOTH = named("add sub mul div").keys() | {Tensor.__eq__}
_LOSSES = {F.cross_entropy, F.nll_loss}
#: Places of arguments after the logits.
_ARGUMENTS = {
    "softmax": ("dim", "dtype"), "log_softmax": ("dim", "dtype"), "gather": ("dim", "index"),
    "take_along_dim": ("indices", "dim"), "topk": ("k", "dim", "largest", "sorted"),
}  # fmt: skip
_OF_LOSS = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


def step_of(
    lazy: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Step, ...], torch.dtype] | None:
    """All steps to what ``func`` gives, if that is ``[..., V]``, and its dtype; None if it is not known."""
    if func in _OVER_WORDS:
        given = _given(_OVER_WORDS[func], args, kwargs)
        given.pop("_stacklevel", None)
        if not _is_last(lazy, given.get("dim")) or not given.keys() <= {"dim", "dtype"}:
            return None
        run = _under(lazy, partial(getattr(Tensor, _OVER_WORDS[func]), **given | {"dim": -1}))
        return (*lazy.head.steps, (run, (), {})), _shown(lazy, run, _row(lazy.like)).dtype
    if func in _ALONE and not any(isinstance(a, Tensor) for a in tree_leaves((args, kwargs))):
        run = _under(lazy, func)
        out = _shown(lazy, lambda z: run(z, *args, **kwargs), _row(lazy.like))
        return (*lazy.head.steps, (run, tuple(args), kwargs)), out.dtype
    if func in _OF_BOTH and len(args) == 1 and not kwargs:
        mine, other = lazy.head.steps, _steps_beside(lazy, args[0])
        if other is not None:
            steps, like = other
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(mine, steps, strict=False)))
            run = _under(lazy, func)
            both: Step = (lambda z: run(followed(z, mine[same:]), followed(z, steps[same:]))), (), {}
            return (*mine[:same], both), _shown(lazy, run, _row(lazy.like), _row(like)).dtype
    return None


def _first_of(func: Callable[..., Any], z: Tensor) -> Tensor:
    out: Tensor | tuple[Tensor, ...] = func(z)
    return out if isinstance(out, Tensor) else out[0]


def asked_of(lazy: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What ``func`` gives, computed by row; None if it is not known to be a function of each."""
    if func in _LOSSES:
        return _loss(lazy, func, dict(zip(_OF_LOSS, args, strict=False)) | kwargs)
    if func not in _REDUCED:
        return None
    name = _REDUCED[func]
    given = _given(name, args, kwargs)
    if name in ("sum", "mean") and not given:
        wide = torch.promote_types(lazy.dtype, torch.float32)
        total = _ask(lazy, partial(Tensor.sum, dim=-1, dtype=wide)).sum()
        dtype = _shown(lazy, _under(lazy, func), _row(lazy.like)).dtype
        return (total / lazy.numel() if name == "mean" else total).to(dtype)
    index = given.pop("index", given.pop("indices", None))
    if not _is_last(lazy, given.get("dim", -1 if name == "topk" else None)):
        return None
    if any(isinstance(a, Tensor) for a in given.values()) or "out" in given or given.get("sparse_grad"):
        return None
    given["dim"] = -1
    if name not in ("gather", "take_along_dim"):
        return _ask(lazy, partial(getattr(Tensor, name), **given))
    if type(index) is not Tensor or index.shape[:-1] != lazy.shape[:-1] or index.dtype != torch.int64:
        return None
    return _ask(lazy, lambda z, index: z.gather(-1, index), index.reshape(-1, index.shape[-1]))


def chosen(lazy: Any, index: Tensor) -> Any:
    """Of each row ``[n, V]`` the word in ``index``, ``[n]``."""
    return _ask(lazy, lambda z, index: z[torch.arange(len(z), device=z.device), index], index)


def _loss(lazy: Any, func: Callable[..., Tensor], given: dict[str, Any]) -> Tensor | None:
    """One a row, and their sum or mean; not a mean over class weights."""
    target, how, ignored = given.pop("target"), given.pop("reduction", "mean"), given.get("ignore_index", -100)
    is_old = given.get("size_average") is not None or given.get("reduce") is not None
    weight = given.get("weight")
    is_weighed = weight is not None and (how == "mean" or weight.requires_grad)
    is_plain = type(target) is Tensor and target.dtype == torch.int64 and target.shape == lazy.shape[:-1]
    if is_old or is_weighed or not is_plain or lazy.dim() != 2 or how not in ("none", "sum", "mean"):
        return None
    losses: Tensor = _ask(lazy, partial(func, **given, reduction="none"), target)
    if how == "none":
        return losses
    total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    return (total / (target != ignored).sum() if how == "mean" else total).to(losses.dtype)


def _ask(lazy: Any, func: Callable[..., Any], *by_row: Tensor) -> Any:
    """What ``func`` gives of each row of logits and of ``by_row``."""
    run, lead = _under(lazy, func), lazy.shape[:-1]
    out = _shown(lazy, run, lazy.like.new_empty(lead.numel(), lazy.shape[-1]), *by_row)
    likes = (out,) if isinstance(out, Tensor) else tuple(out)
    given = tuple(tensor.clone() for tensor in by_row)  # which may be written to before backward
    with torch.set_grad_enabled(torch.is_grad_enabled() and likes[0].is_floating_point()):
        found = lazy.rows.ask(Asked(run, lazy.head.steps, given, lazy.start, likes), lead)
    return found[0] if isinstance(out, Tensor) else type(out)(found)


def _steps_beside(lazy: Any, other: Any) -> tuple[tuple[Step, ...], Tensor] | None:
    """Steps from the same rows' logits to ``other``, ``[..., V]`` or ``[..., 1]``; and that without bytes."""
    if type(other) is Tensor and other.shape == (*lazy.shape[:-1], 1) and (asked := lazy.rows.asked_for(other)):
        is_here = asked.start == lazy.start and not asked.by_row
        is_same = other.requires_grad == (lazy.requires_grad and torch.is_grad_enabled())
        like = torch.empty(other.shape, dtype=other.dtype, device="meta")
        return ((*asked.steps, (partial(_first_of, asked.func), (), {})), like) if is_here and is_same else None
    if type(other) is not type(lazy) or other.is_computed():
        return None
    is_same = other.rows is lazy.rows and other.start == lazy.start and other.requires_grad == lazy.requires_grad
    return (other.head.steps, other.like) if is_same and other.shape == lazy.shape else None


def _given(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    given = dict(zip(_ARGUMENTS.get(name, ("dim", "keepdim")), args, strict=False)) | kwargs
    if "axis" in given:
        given["dim"] = given.pop("axis")
    return {key: value for key, value in given.items() if value is not None}


def _is_last(lazy: Any, dim: Any) -> bool:
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    return type(dim) is int and dim in (-1, lazy.dim() - 1)


def _under(lazy: Any, func: Callable[..., Any]) -> Callable[..., Any]:
    """``func`` under the autocast of now, if that is not the head's."""
    now, of_head = AutocastState(lazy.device.type), lazy.head.autocast
    return func if (now.enabled, now.dtype) == (of_head.enabled, of_head.dtype) else partial(run_under, now, func)


def _shown(lazy: Any, func: Callable[..., Any], *given: Tensor) -> Any:
    """What ``func`` gives, without bytes; under autocast, in the dtype that one row tells."""
    out = func(*(torch.empty_like(tensor, device="meta") for tensor in given))
    if not lazy.head.autocast.enabled and not AutocastState(lazy.device.type).enabled:
        return out
    with no_modes(), lazy.head.autocast, torch.no_grad():
        one = func(*(torch.zeros(1, *tensor.shape[1:], dtype=tensor.dtype, device=lazy.device) for tensor in given))
    if isinstance(out, Tensor):
        return out.to(one.dtype)
    return type(out)(a.to(b.dtype) for a, b in zip(out, one, strict=True))


def _row(like: Tensor) -> Tensor:
    return like.new_empty(1, like.shape[-1])
