"""Logits that are not computed yet: a loss takes them chunk by chunk, and any other function gets them whole.

A head hands on a :class:`LazyLogits`: a tensor by shape, dtype and device, without bytes. What is done between head and
loss (``float()``, a softcap, a scale, ``view(-1, vocabulary)``, dropping the last token, a log-softmax) gives another
one. ``F.cross_entropy`` of it is that of :mod:`~hf_memsave.ops.loss.chunked_loss`, and what is asked of each row (a
``gather``, a sum over the words) is computed :mod:`~hf_memsave.ops.loss.by_row`. Any other function runs on the logits
themselves, computed once, by the head's own forward if nothing was asked of them; then their views are views of those.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_memsave.errors import PatchError
from hf_memsave.ops.loss import chunked_loss
from hf_memsave.ops.loss.by_row import Asked, Rows
from hf_memsave.ops.loss.head import Head, Step, gradients
from hf_memsave.ops.loss.row_functions import asked_of, chosen, named, step_of
from hf_memsave.ops.op import once_differentiable
from hf_memsave.tape import current
from hf_memsave.tape.as_stock import in_place_of_stock
from hf_memsave.tape.private import no_subclasses, tree_leaves, tree_map

#: Functions of each logit by itself, where their other arguments are numbers.
_ELEMENTWISE = named(
    "float double half bfloat16 to tanh mul div true_divide multiply divide __mul__ __rmul__ __truediv__ neg clamp type"
)
#: Functions that keep the order of the numbers.
_RESHAPED = {
    Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.contiguous, Tensor.squeeze,
    Tensor.unsqueeze, Tensor.detach, torch.detach,
}  # fmt: skip
#: Functions that give several tensors, of some of the first dimension each.
_SPLIT = {Tensor.unbind, torch.unbind, Tensor.split, torch.split, Tensor.chunk, torch.chunk}
_DETACHED = {Tensor.detach, torch.detach}
#: What a tensor is, told without its bytes.
_TOLD = {
    told if callable(told) else told.__get__
    for name in "shape dtype device ndim layout requires_grad grad_fn is_leaf is_cuda is_cpu is_meta is_sparse "
    "is_quantized itemsize nbytes retains_grad output_nr _version size dim numel nelement is_floating_point "
    "is_complex element_size get_device __len__ ndimension is_signed".split()
    for told in (getattr(Tensor, name),)
}
#: Logits of forwards without gradients, which may be read after a step (an old policy's).
_constant: weakref.WeakValueDictionary[int, LazyLogits] = weakref.WeakValueDictionary()


def _read(*_: Any) -> None:
    """Compute what is left unread, which other weights would compute after this optimizer's step."""
    for lazy in list(_constant.values()):
        if not (lazy.is_taken or lazy.is_computed()):
            lazy.computed()
    _constant.clear()


#: Asked of the process, once, from the first such logits on.
_read_before_steps = cache(partial(register_optimizer_step_pre_hook, _read))


class LazyLogits(Tensor):
    """Logits ``[..., V]`` of ``hidden`` ``[..., H]``; see the module."""

    hidden: Tensor
    head: Head
    like: Tensor  # without bytes, of the geometry and dtype that they have in stock
    base: tuple[LazyLogits, Step] | None  # those that they are a view of in stock, and by which function
    rows: Rows  # all that may be computed together
    start: int  # the first of them
    is_taken: bool  # a loss, or other logits, were computed past them
    is_watched: bool  # their gradient is asked for: nothing is computed past them any more
    _computed: Tensor | None

    @staticmethod
    def of(
        hidden: Tensor, head: Head, like: Tensor, base: Any = None, rows: tuple[Rows, int] | None = None
    ) -> LazyLogits:
        """Logits of the shape and dtype of ``like``, a tensor without bytes; of some of ``rows``, from which one on."""
        with in_place_of_stock(current()):
            lazy: Any = _Later.apply(hidden, head, like, *head.parameters())
        lazy.hidden, lazy.head, lazy.like, lazy.base = hidden, head, like, base
        lazy.is_taken, lazy.is_watched, lazy._computed = False, False, None
        lazy.rows, lazy.start = rows or (Rows(hidden, head, like.shape[-1]), 0)
        if base is None and not lazy.requires_grad:
            _read_before_steps()
            _constant[id(lazy)] = lazy
        return lazy

    def computed(self) -> Tensor:
        """The logits, computed when they are first asked for."""
        if self._computed is None:
            self.rows.check()
            with torch.inference_mode(False), torch.enable_grad():
                if self.base is None or self.is_watched:
                    self._computed = _Real.apply(self)
                else:
                    base, (func, args, kwargs) = self.base
                    self._computed = func(base.computed(), *args, **kwargs)
        assert self._computed is not None
        return self._computed

    def is_computed(self) -> bool:
        """Whether they, or what they are a view of, were read (and may be written to since), or are watched."""
        is_here = self.is_watched or self._computed is not None
        return is_here or (self.base is not None and self.base[0].is_computed())

    def has_rows(self) -> bool:
        """Whether a gradient gets to the hidden states; not where a Function of the caller's has handed these on."""
        return self.rows.gate.requires_grad or not self.requires_grad

    def watch(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``register_hook`` of what is not computed yet (FSDP2 has freed the head), or ``retain_grad``."""
        is_fsdp = any(str(getattr(hook, "__module__", "")).startswith("torch.distributed") for hook in args)
        if self.is_taken and not is_fsdp:
            warnings.warn(
                f"{func.__name__}: a loss of these logits was computed in chunks, and gives them no gradient. Call it "
                "in a forward hook of the head, or use MemSaveConfig(loss='stock').",
                stacklevel=4,
            )
        if func is Tensor.retain_grad:
            return self.computed().retain_grad()
        self.is_watched = True
        with no_subclasses():
            return func(self, *args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, self = kwargs or {}, (*args, None)[0]
        is_lazy = isinstance(self, LazyLogits) and not self.is_computed()
        if is_lazy and func in _TOLD:
            with no_subclasses():
                return func(*args, **kwargs)
        if is_lazy and self.has_rows():
            if func in (Tensor.register_hook, Tensor.retain_grad):
                return self.watch(func, *args[1:], **kwargs)
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.requires_grad and func not in _DETACHED):
                found = _derived(self, func, args[1:], kwargs)
                if found is None and func is F.cross_entropy and torch.is_grad_enabled():
                    found = chunked_loss.cross_entropy(self.hidden, self.head, self, *args[1:], **kwargs)
                if found is None:
                    found = asked_of(self, func, args[1:], kwargs)
            if found is not None:
                taken = None if found is self or getattr(found, "base", None) is not None else self
                while taken is not None:  # from now on their gradient would not come to a hook on them
                    taken.is_taken, taken = True, taken.base and taken.base[0]
                return found
        if func is torch.broadcast_tensors and not any(isinstance(a, LazyLogits) and a.is_computed() for a in args):
            shape = torch.broadcast_shapes(*(a.shape for a in args))
            if all(a.shape == shape or not isinstance(a, LazyLogits) for a in args):  # as a Categorical does
                return tuple(a if isinstance(a, LazyLogits) else _computed(a).expand(shape) for a in args)
        if func is torch.autograd.grad and any(a.is_taken for a in tree_leaves(args[1]) if isinstance(a, LazyLogits)):
            raise PatchError(
                "torch.autograd.grad: expected logits that the loss was computed from, got logits whose loss was "
                "computed in chunks, past them. Use MemSaveConfig(loss='stock'), or ask for the gradient of the "
                "model's hidden states."
            )
        args, kwargs = tree_map(_computed, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # which autograd does to what a function returns
            return _empty(args[0], args[0].device)
        args, kwargs = tree_map(_computed, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.computed())


def _empty(like: Tensor, device: torch.device) -> Tensor:
    """Logits without bytes."""
    make: Any = Tensor._make_wrapper_subclass
    return make(LazyLogits, like.shape, dtype=like.dtype, device=device)


def _computed(argument: Any) -> Any:
    return argument.computed() if isinstance(argument, LazyLogits) else argument


def _derived(lazy: LazyLogits, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What ``func`` gives, lazy; None where that is not known to be the function of fewer, or other, rows."""
    lazy.rows.check()
    place = lazy.rows, lazy.start
    if (made := step_of(lazy, func, args, kwargs)) is not None:
        head = lazy.head.with_steps(made[0])  # which fuses no loss: a kernel would write over what backward needs
        return LazyLogits.of(lazy.hidden, head, lazy.like.new_empty(lazy.shape, dtype=made[1]), None, place)
    if any(isinstance(a, Tensor) for a in tree_leaves((args, kwargs))):
        return _of_chosen(lazy, args[0]) if func is Tensor.__getitem__ else None
    head, hidden, words = lazy.head, lazy.hidden, lazy.shape[-1]
    if func in _ELEMENTWISE:
        here = _without_device(lazy, args, kwargs)
        like = None if here is None else func(lazy.like, *here[0], **here[1])
        if like is lazy.like or not isinstance(like, Tensor):  # ``type()`` of no dtype says what they are
            return lazy if like is lazy.like else None
        after = head.with_steps((*head.steps, (func, *here)), head.fuses_loss)
        return LazyLogits.of(hidden, after, like, None, place)
    if func in _SPLIT:
        return _split(lazy, func, args, kwargs)
    if func in _RESHAPED:
        like = func(lazy.like, *args, **kwargs)
        if like is lazy.like or like.shape[-1:] != lazy.shape[-1:]:
            return lazy if like is lazy.like else None
        rows = hidden.reshape(*like.shape[:-1], hidden.shape[-1])  # which stay whole, and in order
    elif func is Tensor.__getitem__:
        index = args[0] if isinstance(args[0], tuple) else args[:1]
        if not {type(i) for i in index} <= {int, slice, type(None), type(...)}:  # a list may put rows in another order
            return None
        like = lazy.like[args[0]]
        wider = lazy.like.new_empty(*lazy.shape[:-1], words + 1)[args[0]]
        if not like.dim() or wider.shape != (*like.shape[:-1], words + 1) or like.shape[-1] != words:
            return None
        rows = hidden[args[0]]
        is_run = wider.is_contiguous()
        if is_run:
            place = lazy.rows, lazy.start + wider.storage_offset() // (words + 1)
        else:  # of the same slice, asked for twice, the rows are the same
            key = lazy.start, wider.storage_offset(), wider.shape, wider.stride(), torch.is_grad_enabled()
            place = lazy.rows.parts.get(key) or Rows(rows, head, words), 0
            lazy.rows.parts[key] = place[0]
    else:
        return None
    is_view = like.untyped_storage()._cdata == lazy.like.untyped_storage()._cdata
    return LazyLogits.of(rows, head, like, (lazy, (func, tuple(args), kwargs)) if is_view else None, place)


def _split(lazy: LazyLogits, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    is_one = func in (Tensor.unbind, torch.unbind)
    place = 0 if is_one else 1
    if kwargs.get("dim", args[place] if len(args) > place else 0) != 0 or lazy.dim() == 1:
        return None
    if is_one:
        return tuple(lazy[i] for i in range(len(lazy)))
    stops = list(itertools.accumulate(map(len, func(torch.empty(len(lazy), device="meta"), *args, **kwargs))))
    return tuple(lazy[start:stop] for start, stop in zip([0, *stops], stops, strict=False))


def _of_chosen(lazy: LazyLogits, index: Any) -> Any:
    """Of rows that a tensor chooses the logits; of those and a word each, that word's. None for other indices."""
    index = index if isinstance(index, tuple) else (index,)
    if any(type(i) is not Tensor for i in index):
        return None
    rows, *words = index
    is_mask = rows.dtype == torch.bool and rows.shape == lazy.shape[: rows.dim()] and rows.dim() < lazy.dim()
    is_number = rows.dtype == torch.int64 and lazy.dim() > 1
    is_pair = is_number and lazy.dim() == 2 and len(words) == 1 and words[0].dtype == torch.int64
    is_pair = is_pair and rows.dim() == 1 and rows.shape == words[0].shape
    if not (is_mask or is_number) or (words and not is_pair):
        return None
    hidden = lazy.hidden[rows]
    of_rows = LazyLogits.of(hidden, lazy.head, lazy.like.new_empty(*hidden.shape[:-1], lazy.shape[-1]))
    return chosen(of_rows, words[0]) if words else of_rows


def _without_device(lazy: LazyLogits, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The arguments but for a device, if that is the logits' own; None for another one, and for ``out=``."""
    devices = (torch.device, str)
    named = [a for a in (*args, kwargs.get("device")) if isinstance(a, devices)]
    if "out" in kwargs or any(torch.device(d) != lazy.device for d in named):
        return None
    rest = {name: a for name, a in kwargs.items() if name != "device"}
    return tuple(a for a in args if not isinstance(a, devices)), rest


class _Later(torch.autograd.Function):
    """The place of logits in the graph: a gradient that comes down goes on to what they were made of."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Head, like: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.head, ctx.parameters = head, parameters
        return _empty(like, hidden.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        (hidden,) = ctx.saved_tensors
        x = hidden.detach().requires_grad_()
        inputs = [x, *(p for p in ctx.parameters if p.requires_grad)]
        with torch.enable_grad():
            logits = ctx.head(x.view_as(x))
        found = dict(zip(map(id, inputs), gradients(logits, inputs, dy), strict=True))
        return found[id(x)], None, None, *(found.get(id(parameter)) for parameter in ctx.parameters)


class _Real(torch.autograd.Function):
    """The logits themselves, with the bits that were asked for numbers."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyLogits) -> Tensor:
        if not lazy.rows.was_asked:
            return lazy.head(lazy.hidden.detach())
        whole = Asked(Tensor.detach, lazy.head.steps, (), lazy.start, (lazy.like.view(-1, lazy.shape[-1]),))
        return lazy.rows.run(whole, lazy.shape[:-1])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy
