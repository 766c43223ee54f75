"""Numbers of rows of logits that are not computed yet: the first that is read is computed with all that wait.

So what a script asks of the same logits, one function after another, costs one run over their chunks. A number is read
by any function but those that keep all of it (``squeeze``), and before any optimizer's step.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_memsave.errors import KeptTensorChangedError
from hf_memsave.ops.loss.by_row import Asked, chunks, gate_of, same
from hf_memsave.ops.loss.head import Head
from hf_memsave.ops.op import once_differentiable
from hf_memsave.tape import current
from hf_memsave.tape.as_stock import in_place_of_stock
from hf_memsave.tape.private import backward_id, no_modes, no_subclasses, tree_leaves, tree_map

#: Whose numbers wait: an optimizer's step would change what they are computed by.
_unread: weakref.WeakSet[Rows] = weakref.WeakSet()


@register_optimizer_step_pre_hook
def _read(*_: Any) -> None:
    for rows in list(_unread):
        rows.compute()


class Rows:
    """Rows of hidden states ``[..., H]`` whose logits are asked for numbers; those that wait are computed together."""

    def __init__(self, hidden: Tensor, head: Head, words: int) -> None:
        self.words, self.hidden, self.version = words, hidden.detach(), hidden._version
        self.head = copy.copy(head)
        self.head.steps = ()
        self.asked: list[Any] = []  # in a backward, until the gate is run
        self.waiting: list[weakref.ref[Numbers]] = []
        self.parts: weakref.WeakValueDictionary[Any, Rows] = weakref.WeakValueDictionary()
        with in_place_of_stock(current()):
            self.gate = gate_of(hidden, self.head, words, self.asked)

    def check(self) -> None:
        """Raise where the hidden states have been written to since.

        Raises:
            KeptTensorChangedError: They have.
        """
        if self.hidden._version != self.version:
            raise KeptTensorChangedError(
                "these logits are computed when they are first read, and the hidden states that they are made of have "
                "been written to in place since. Write to a copy, or use MemSaveConfig(loss='stock')."
            )

    def compute(self) -> None:
        """Compute all that waits."""
        waiting = [one for ref in self.waiting if (one := ref()) is not None]
        self.waiting.clear()
        _unread.discard(self)
        if not waiting:
            return
        self.check()
        self.head.check()
        every, head = [one.asked for one in waiting], self.head
        flat = self.hidden.reshape(-1, self.hidden.shape[-1])
        with torch.inference_mode(False), torch.no_grad(), no_modes(), saved_tensors_hooks(same, same):
            for one in waiting:
                one.found = tuple(
                    torch.empty(*one.lead, *like.shape[1:], dtype=like.dtype, device=flat.device)
                    for like in one.asked.likes
                )
            for chunk, of_chunk in chunks(every, self.words, flat):
                z = head.of_chunk(flat[chunk])
                with head.autocast:
                    for i, part in of_chunk:
                        asked, found = every[i], waiting[i].found
                        values = asked.of(z[part.start - chunk.start : part.stop - chunk.start], part)
                        for out, like, value in zip(found, asked.likes, values, strict=True):
                            out.view(like.shape)[part.start - asked.start : part.stop - asked.start] = value
                        del values, value
                del z
        head.renew()  # some adapters write to their own weights


#: What is told of numbers that are not computed yet.
_GEOMETRY = (
    "shape dtype ndim layout itemsize nbytes size dim numel nelement is_floating_point is_complex element_size __len__ "
    "ndimension is_signed device requires_grad"
)
_TOLD = {told if callable(told) else told.__get__ for told in (getattr(Tensor, name) for name in _GEOMETRY.split())}
#: What may wait with them, where it keeps all of them: mostly the next thing that is asked.
_VIEWED = {
    Tensor.squeeze, torch.squeeze, Tensor.unsqueeze, torch.unsqueeze, Tensor.__getitem__, Tensor.view, Tensor.reshape,
}  # fmt: skip


class Numbers(Tensor):
    """A number of each row, not computed yet: what is asked of the same rows before one is read is computed with it."""

    rows: Rows
    asked: Asked
    lead: tuple[int, ...]  # the dimensions of rows
    source: Numbers | None  # what it is a view of
    found: tuple[Tensor, ...]  # what has been computed, without a graph
    _value: Tensor | None

    @staticmethod
    def of(rows: Rows, asked: Asked, lead: tuple[int, ...], shape: Any, source: Numbers | None = None) -> Numbers:
        """One of this shape, of rows of dimensions ``lead``."""
        like = asked.likes[0].new_empty(shape)
        with in_place_of_stock(current()):
            one: Any = _Place.apply(rows.gate, rows.asked, asked, like, rows.hidden.device, *asked.by_row)
        one.rows, one.asked, one.lead, one.source, one.found, one._value = rows, asked, lead, source, (), None
        if source is None:
            rows.waiting.append(weakref.ref(one))
            _unread.add(rows)
        return one

    def computed(self) -> Tensor:
        """The numbers, computed with all that waits."""
        if self._value is None:
            if self.source is None and not self.found:
                self.rows.compute()
            with torch.inference_mode(False), torch.enable_grad():
                self._value = _Value.apply(self) if self.source is None else self.source.computed().view(self.shape)
        assert self._value is not None
        return self._value

    def is_written(self) -> bool:
        """Whether it has other numbers now than those that were asked for."""
        if self.source is not None:
            return self.source.is_written()
        return self._value is not None and self._value._version > 0

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, self = kwargs or {}, args[0] if args else None
        if isinstance(self, Numbers) and self._value is None:
            if func in _TOLD:
                with no_subclasses():
                    return func(*args, **kwargs)
            if func in _VIEWED and not any(isinstance(a, Tensor) for a in tree_leaves((args[1:], kwargs))):
                like = func(torch.empty(self.shape, device="meta"), *args[1:], **kwargs)
                if like.numel() == self.numel() and like.dtype == torch.float32 and like.is_contiguous():
                    with torch.set_grad_enabled(torch.is_grad_enabled() and self.requires_grad):
                        return Numbers.of(self.rows, self.asked, self.lead, like.shape, self)
        args, kwargs = tree_map(computed, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # which autograd does to what a function returns
            return _empty(args[0], args[0].device)
        args, kwargs = tree_map(computed, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.computed())


def _empty(like: Tensor, device: torch.device) -> Tensor:
    make: Any = Tensor._make_wrapper_subclass
    return make(Numbers, like.shape, dtype=like.dtype, device=device)


def computed(argument: Any) -> Any:
    """The numbers, or what else was given."""
    return argument.computed() if isinstance(argument, Numbers) else argument


class _Place(torch.autograd.Function):
    """The place of numbers in the graph: a gradient that comes down goes on to the gate."""

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, waiting: list[Any], asked: Asked, like: Tensor, device: torch.device, *by_row: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*by_row)
        ctx.waiting, ctx.asked = waiting, asked._replace(by_row=())
        ctx.set_materialize_grads(False)
        return _empty(like, device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        asked = ctx.asked._replace(by_row=ctx.saved_tensors)
        ctx.waiting.append((backward_id(), asked, dy.reshape(asked.likes[0].shape)))
        return dy.new_zeros(()), *(None,) * (4 + len(asked.by_row))


class _Value(torch.autograd.Function):
    """The numbers themselves."""

    @staticmethod
    def forward(ctx: Any, numbers: Numbers) -> Tensor:
        return numbers.found[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy
