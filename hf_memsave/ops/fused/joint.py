r"""``Joint``: an input of several functions gets its gradient through one node, to whose sum their products add.

For an input x of linears with incoming gradients dy₁ … dyₙ, and of a residual with dx₀::

    stock    dx = dx₀ + dy₁ W₁ + … + dyₙ Wₙ      n sums beside the products, each of which reads two and writes one
    here     dx = dx₀;  dx += dyᵢ Wᵢ             the products read and write dx as they go

Those functions give autograd no gradient of x and add it to a sum that the node holds, one for each backward; the
node's backward runs after theirs. Nothing is kept, and x's hooks see the whole gradient. As in stock, autograd sums
where a function's node has hooks, and what is differentiated again, in batches or on another stream; the gradient at
the node is None. An input that is taken more than once is recognized by the first parameter that takes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hf_memsave.device import current_stream
from hf_memsave.tape import Tape
from hf_memsave.tape.private import backward_id, is_to_run, node_class, stands_for_many

#: Parameters whose products took an input that others took as well, in some forward.
_shared = WeakIdKeyDictionary()


@dataclass
class RunningSum:
    """The sum so far of a gradient in one backward: a tensor to add to in place, held nowhere else."""

    total: Tensor | None = None


class Joint:
    """The sums of the gradient of an input ``x``, one for each backward, on its device and stream."""

    def __init__(self, x: Tensor) -> None:
        self._device, self._stream = x.device, current_stream(x.device)
        self._sums: dict[int, RunningSum] = {}

    def sum_for(self, ctx: Any, place: int, *dys: Tensor | None) -> RunningSum | None:
        """Return the sum to add a function's gradient of its tensor at ``place`` to; None to give it to autograd."""
        is_plain = all(dy is None or not (dy.requires_grad or stands_for_many(dy)) for dy in dys)
        if not is_plain or current_stream(self._device) != self._stream:
            return None
        key = backward_id()
        if key not in self._sums and is_to_run(ctx.next_functions[place][0]):
            self._sums[key] = RunningSum()
        return self._sums.get(key)

    def take(self) -> Tensor | None:
        """Return this backward's sum, if there is one, and forget it."""
        return self._sums.pop(backward_id(), RunningSum()).total


def edge_of(tape: Tape, x: Tensor, parameter: Tensor | None = None) -> tuple[Tensor, Joint | None]:
    """Return the tensor to take instead of x, of its shape and without its numbers, and the joint to add to.

    That is x itself and None where autograd sums. ``parameter`` is None for a function that never comes first.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x, None
    last_two = tape.memo.get(edge_of, ())  # attention takes the decoder's states, the encoder's, and adds
    known = next((one for one in last_two if one.is_of(x)), None)
    if known is None and parameter is not None:
        known = _Known(x, parameter)
        tape.memo[edge_of] = known, *last_two[:1]
    return (x, None) if known is None else known.edge(x)


def leaves_if_hooked(function: Any) -> Any:
    """Decorate a Function to drop its ``ctx.joint`` once its node has a hook, which may change x's gradient."""
    node = node_class(function)
    inherited = node.register_hook

    def register_hook(ctx: Any, hook: Callable[..., Any]) -> Any:
        ctx.joint = None
        return inherited(ctx, hook)

    node.register_hook = register_hook
    return function


class _Known:
    """An input that a function took, noted for the functions that take it after."""

    def __init__(self, x: Tensor, first: Tensor) -> None:
        self._ref, self._first = weakref.ref(x), weakref.ref(first)
        self._state, self._uses = _state(x), 0
        self._joint = Joint(x) if first in _shared else None
        self._end = None if self._joint is None else _Join.apply(x, self._joint)

    def is_of(self, x: Tensor) -> bool:
        """Return whether this is ``x``, unwritten and still part of the same graph."""
        return self._ref() is x and self._state == _state(x)

    def edge(self, x: Tensor) -> tuple[Tensor, Joint | None]:
        """Count a use, and return what :func:`edge_of` does."""
        self._uses += 1
        if self._uses == 2 and (first := self._first()) is not None:
            _shared[first] = True
        return x if self._end is None else self._end, self._joint


def _state(x: Tensor) -> tuple[int, bool]:
    return x._version, x.is_leaf  # writes give it another node, and detach_() none


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, joint: Joint) -> Tensor:
        ctx.joint = joint
        ctx.set_materialize_grads(False)
        return x.new_empty(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None) -> tuple[Tensor | None, None]:
        total = ctx.joint.take()
        return (dx if total is None else total if dx is None else total + dx), None
