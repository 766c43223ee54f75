r"""Numbers of each row of logits (a log-probability, an entropy, the largest), a few rows at a time.

Kept for backward, with T tokens, V words and x ``[T, H]`` the head's input::

    stock      the log-softmax, and with an entropy p and the products of both: 4 V to 16 V bytes a token
    here       x, which is kept for others, and what chooses words; one chunk of logits at a time, forward and backward

Each number is computed when it is asked for: a chunk's logits are computed, asked, and dropped. The graph has one node
for all that is asked of the same rows, which autograd runs last: backward computes each chunk's logits once more, runs
what was asked of them under autograd, and hands one sum of gradients to the head (see :mod:`.sums`) and to x. So a
trained head runs three products and one for each number, where stock runs three; a frozen one two, where stock runs
two. All equals stock's up to the order of fp32 sums.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hf_memsave.device import has_numbers
from hf_memsave.errors import KeptTensorChangedError
from hf_memsave.ops.loss import chunked_loss
from hf_memsave.ops.loss.head import Head, Step, followed, gradients
from hf_memsave.ops.loss.sums import gradient
from hf_memsave.ops.op import once_differentiable
from hf_memsave.tape import current
from hf_memsave.tape.as_stock import in_place_of_stock
from hf_memsave.tape.content import same
from hf_memsave.tape.private import backward_id, no_autocast, no_modes, stands_for_many

#: Tensors as large as a chunk's logits that there may be at once: those of an entropy, in backward, and room.
_ALIVE = 16


class Asked(NamedTuple):
    """What is asked of rows from ``start`` on: ``func`` of logits after ``steps``, and of tensors with as many rows."""

    func: Callable[..., Any]
    steps: tuple[Step, ...]
    by_row: tuple[Tensor, ...]
    start: int
    likes: tuple[Tensor, ...]  # what comes out, ``[rows, ...]``, without bytes; all but the first is constant

    def within(self, part: slice) -> slice:
        """The rows in ``part`` that this asks about: an empty slice where that is none of them."""
        return slice(max(part.start, self.start), min(part.stop, self.start + len(self.likes[0])))

    def of(self, z: Tensor, part: slice) -> tuple[Tensor, ...]:
        """What comes out for ``part``, which ``z`` are the logits of, after the head's own steps."""
        here = slice(part.start - self.start, part.stop - self.start)
        out = self.func(followed(z, self.steps), *(tensor[here] for tensor in self.by_row))
        return (out,) if isinstance(out, Tensor) else tuple(out)


class Rows:
    """Rows of hidden states ``[..., H]`` whose logits may be asked for numbers."""

    def __init__(self, hidden: Tensor, head: Head, words: int) -> None:
        self.words, self.hidden, self.version = words, hidden.detach(), hidden._version
        self.head = head.with_steps(())
        self.asked: list[Any] = []  # in a backward, until the gate is run
        self.was_asked = False
        self.given: list[tuple[weakref.ref[Tensor], int, Asked]] = []  # numbers, and the version that they had
        self.parts: dict[Any, Rows] = {}  # slices that have been asked for
        with in_place_of_stock(current()):
            self.gate: Tensor = _Gate.apply(hidden, self.head, words, self.asked, *self.head.parameters())

    def check(self) -> None:
        """Raise KeptTensorChangedError where the hidden states have been written to since."""
        if self.hidden._version != self.version:
            raise KeptTensorChangedError(
                "these logits are computed when they are first read, and the hidden states that they are made of have "
                "been written to in place since. Write to a copy, or use MemSaveConfig(loss='stock')."
            )

    def ask(self, asked: Asked, lead: tuple[int, ...]) -> tuple[Tensor, ...]:
        """What comes out, computed now, of rows of dimensions ``lead``."""
        found, self.was_asked = self.run(asked, lead), True
        with in_place_of_stock(current()):
            out: tuple[Tensor, ...] = _Numbers.apply(self.gate, self.asked, asked, found, *asked.by_row)
        self.given = [one for one in self.given if one[0]() is not None]
        self.given.append((weakref.ref(out[0]), out[0]._version, asked))
        return out

    def asked_for(self, number: Tensor) -> Asked | None:
        """What was asked for this number, if no one has written to it or watches it since."""
        found = (one for ref, version, one in self.given if ref() is number and number._version == version)
        return None if number._backward_hooks else next(found, None)

    def run(self, asked: Asked, lead: tuple[int, ...]) -> tuple[Tensor, ...]:
        """As :meth:`ask`, without a graph."""
        self.check()
        self.head.check()
        flat = self.hidden.reshape(-1, self.hidden.shape[-1])
        with torch.inference_mode(False), torch.no_grad(), no_modes(), saved_tensors_hooks(same, same):
            found = tuple(
                torch.empty(*lead, *like.shape[1:], dtype=like.dtype, device=flat.device) for like in asked.likes
            )
            for part in _parts([asked], self.words, flat):
                z = self.head.of_chunk(flat[part])
                with self.head.autocast:
                    values = asked.of(z, part)
                for out, like, value in zip(found, asked.likes, values, strict=True):
                    out.view(like.shape)[part.start - asked.start : part.stop - asked.start] = value
                del z, values, value
        self.head.renew()  # some adapters write to their own weights
        return found


def _parts(every: list[Asked], words: int, flat: Tensor) -> Iterator[slice]:
    """Rows of each chunk, of ``[T, H]``: at the same places, whatever is asked, so that a row has the same logits."""
    wide = torch.promote_types(flat.dtype, torch.float32).itemsize
    rows = chunked_loss.rows_of_chunk(words * wide * _ALIVE, flat)
    starts = range(0, len(flat), rows)
    here = ([one.within(slice(start, start + rows)) for one in every] for start in starts)
    found = [[part for part in parts if part.start < part.stop] for parts in here]
    found = [parts for parts in found if parts]
    for parts in found if has_numbers(flat) else found[:2]:  # the others have as many bytes
        yield slice(min(part.start for part in parts), max(part.stop for part in parts))


class _Numbers(torch.autograd.Function):
    """Numbers in the graph: a gradient that comes down waits for the gate."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, waiting: list[Any], asked: Asked, found: Any, *by_row: Tensor) -> Any:
        ctx.save_for_backward(*by_row)
        ctx.waiting, ctx.asked = waiting, asked._replace(by_row=())
        ctx.mark_non_differentiable(*found[1:])
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
        asked = ctx.asked._replace(by_row=ctx.saved_tensors)
        ctx.waiting.append((backward_id(), asked, dy.reshape(asked.likes[0].shape)))
        return dy.new_zeros(()), *(None,) * (3 + len(asked.by_row))


class _Gate(torch.autograd.Function):
    """Where gradients of all that was asked of the same rows come together: it is run after all that did."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Head, words: int, asked: list[Any], *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.head, ctx.words, ctx.asked, ctx.parameters = head, words, asked, parameters
        return hidden.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> Any:
        (hidden,), head, now = ctx.saved_tensors, ctx.head, backward_id()
        asked = [(one, dy) for number, one, dy in ctx.asked if number == now]  # not of one that an error has ended
        ctx.asked.clear()
        flat, wide = hidden.reshape(-1, hidden.shape[-1]), torch.promote_types(hidden.dtype, torch.float32)
        needs = zip(ctx.parameters, ctx.needs_input_grad[4:], strict=True)
        wanted = [p for p, is_wanted in needs if is_wanted and p.requires_grad]

        dz_of = partial(_sum_of, head, asked)
        if any(stands_for_many(dy) for _, dy in asked):  # a batch of gradients has no place in a sum
            head.check()
            with torch.enable_grad(), no_modes(), saved_tensors_hooks(same, same):
                x = flat.detach().requires_grad_()
                logits = head.of_chunk(x.view_as(x))
                dz = dz_of(logits.detach(), slice(0, len(flat)))
                with no_autocast():
                    dx, *found = gradients(logits, [x, *wanted], dz)
        else:
            parts = _parts([one for one, _ in asked], ctx.words, flat)
            dx, kept = chunked_loss.in_chunks(head, flat, parts, wanted, wide, dz_of, ctx.needs_input_grad[0], False)
            one = torch.ones((), dtype=wide, device=hidden.device)
            found = [gradient(tensors, one, p.dtype) for tensors, p in zip(kept, wanted, strict=True)]
        of = dict(zip(map(id, wanted), found, strict=True))
        return None if dx is None else dx.view(hidden.shape), None, None, None, *(of.get(id(p)) for p in ctx.parameters)


def _sum_of(head: Head, asked: list[tuple[Asked, Tensor]], z: Tensor, part: slice) -> Tensor:
    """The gradient of logits ``z`` of ``part``: what was asked of them is run again and differentiated, one by one."""
    total: Any = None
    for one, dy in asked:
        here = one.within(part)
        if here.start >= here.stop:
            continue
        with torch.enable_grad(), head.autocast:
            own = z[here.start - part.start : here.stop - part.start].detach().requires_grad_()
            out = one.of(own, here)[0]
        with no_autocast():  # as outside of the forward, where stock's backward runs
            found = torch.autograd.grad(out, own, dy[here.start - one.start : here.stop - one.start])[0]
        if here != part:
            found = F.pad(found, (0, 0, here.start - part.start, part.stop - here.stop))
        total = found if total is None else total + found
    return total
