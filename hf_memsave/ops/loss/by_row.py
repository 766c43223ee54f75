r"""Numbers of each row of logits (a log-probability, an entropy, the largest), a few rows at a time.

Kept for backward, with T tokens, V words and x ``[T, H]`` the head's input::

    stock      the log-softmax, and with an entropy p and the products of both: 4 V to 16 V bytes a token
    here       x, which is kept for others, and what chooses words; one chunk of logits at a time, forward and backward

Forward computes a chunk's logits, what was asked of its rows, and drops them. The graph has one node for all that is
asked of the same rows, :func:`gate_of`, which autograd runs last: backward computes each chunk's logits once more, runs
what was asked of them under autograd, and hands one sum of gradients to the head (see :mod:`.sums`) and to x. So a
trained head runs four products where stock runs three, a frozen one three where stock runs two, however much is asked.
All equals stock's up to the order of fp32 sums.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hf_memsave.device import has_numbers
from hf_memsave.ops.loss import chunked_loss
from hf_memsave.ops.loss.head import Head, Step, gradients
from hf_memsave.ops.loss.sums import Sums, gradient
from hf_memsave.ops.op import once_differentiable
from hf_memsave.tape.private import backward_id, no_autocast, no_modes, stands_for_many


class Both:
    """A step that makes two things of logits ``[rows, V]``, each by steps of its own, and one of both."""

    def __init__(self, func: Callable[..., Tensor], left: Sequence[Step], right: Sequence[Step]) -> None:
        self.func, self.left, self.right = func, left, right

    def __call__(self, z: Tensor) -> Tensor:
        """That one thing."""
        return self.func(followed(z, self.left), followed(z, self.right))


def followed(z: Tensor, steps: Sequence[Step]) -> Tensor:
    """``z`` after ``steps``."""
    for func, args, kwargs in steps:
        z = func(z, *args, **kwargs)
    return z


def _count(steps: Sequence[Step]) -> int:
    """How many tensors as large as the logits they make."""
    return sum(_count(f.left) + _count(f.right) + 1 if isinstance(f, Both) else 1 for f, *_ in steps)


class Asked(NamedTuple):
    """What is asked of some rows: ``func`` of the logits after ``steps``, and of tensors with as many rows."""

    func: Callable[..., Any]
    steps: tuple[Step, ...]
    by_row: tuple[Tensor, ...]
    start: int
    likes: tuple[Tensor, ...]  # what comes out, ``[rows, ...]``, without bytes; all but the first is constant

    @property
    def stop(self) -> int:
        """The row after the last one."""
        return self.start + len(self.likes[0])

    def of(self, z: Tensor, rows: slice) -> tuple[Tensor, ...]:
        """What comes out for ``rows``, which ``z`` are the logits of, after the head's own steps."""
        here = slice(rows.start - self.start, rows.stop - self.start)
        out = self.func(followed(z, self.steps), *(tensor[here] for tensor in self.by_row))
        return (out,) if isinstance(out, Tensor) else tuple(out)


def same(tensor: Tensor) -> Tensor:
    """A saved-tensor hook that does nothing."""
    return tensor


def chunks(
    every: Sequence[Asked], words: int, hidden: Tensor, is_whole: bool = False
) -> Iterator[tuple[slice, list[tuple[int, slice]]]]:
    """Chunks of rows, each with what is asked of it: its place, and the rows that it is asked of."""
    wide = torch.promote_types(hidden.dtype, torch.float32).itemsize
    alive = [(len(one.likes[0]), 1 + _count(one.steps)) for one in every]  # tensors of a chunk's size, in backward
    first, last = min(one.start for one in every), max(one.stop for one in every)
    most = 3 + max(*(n for _, n in alive), -(-sum(rows * n for rows, n in alive) // max(1, last - first)))
    rows = max(1, chunked_loss.CHUNK // 2 // (words * wide * most))
    rows = hidden.shape[:-1].numel() if is_whole else rows
    starts = range(first, last, rows)
    for start in starts if has_numbers(hidden) else starts[:2]:  # the others have as many bytes
        stop = start + rows
        here = [(i, slice(max(start, one.start), min(stop, one.stop))) for i, one in enumerate(every)]
        if of_chunk := [(i, part) for i, part in here if part.start < part.stop]:
            yield slice(min(part.start for _, part in of_chunk), max(part.stop for _, part in of_chunk)), of_chunk


def gate_of(hidden: Tensor, head: Head, words: int, asked: list[Any]) -> Tensor:
    """What stands in the graph for rows' logits. ``asked`` gets, of a backward's number, what was asked and its dy."""
    gate: Tensor = _Gate.apply(hidden, head, words, asked, *head.parameters())
    return gate


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
        needs = ctx.needs_input_grad[4:]
        wanted = [p for p, is_wanted in zip(ctx.parameters, needs, strict=True) if is_wanted and p.requires_grad]
        is_many = any(stands_for_many(dy) for _, dy in asked)
        sums = Sums(wanted, wide, len(flat))
        dx = torch.zeros_like(flat) if ctx.needs_input_grad[0] else None
        head.check()
        with no_modes(), saved_tensors_hooks(same, same):
            for chunk, of_chunk in chunks([one for one, _ in asked], ctx.words, hidden, is_many):
                x = flat[chunk].detach().requires_grad_()
                with torch.enable_grad():
                    with contextlib.nullcontext() if is_many else sums.of_linears(head.module):
                        logits = head.of_chunk(x.view_as(x))  # autocast would share one cast of a leaf
                    z = logits.detach().requires_grad_()
                    dz = _gradient(head, z, chunk, [(*asked[i], part) for i, part in of_chunk])
                    del z
                with no_autocast():  # as outside of the forward, where stock's backward runs
                    found, *others = gradients(logits, [x, *wanted], dz)
                del logits, dz
                if is_many:  # a batch of gradients has no place in a sum
                    of_rows = None if found is None else F.pad(found, (0, 0, chunk.start, len(flat) - chunk.stop))
                    return _of_gate(ctx, hidden, of_rows, dict(zip(map(id, wanted), others, strict=True)))
                for total, other in zip(sums.of.values(), others, strict=True):
                    if other is not None:
                        total.total().add_(other)
                if dx is not None and found is not None:
                    dx[chunk] = found
                del found, others
        head.renew()  # some adapters write to their own weights
        one = torch.ones((), dtype=wide, device=hidden.device)
        kept = {key: gradient(total.kept(), one, total.parameter.dtype) for key, total in sums.of.items()}
        return _of_gate(ctx, hidden, dx, kept)


def _of_gate(ctx: Any, hidden: Tensor, dx: Tensor | None, kept: dict[int, Tensor | None]) -> Any:
    of_hidden = None if dx is None else dx.reshape(hidden.shape)
    return of_hidden, None, None, None, *(kept.get(id(p)) for p in ctx.parameters)


def _gradient(head: Head, z: Tensor, chunk: slice, asked: Sequence[tuple[Asked, Tensor, slice]]) -> Tensor:
    """Of a chunk of logits: what is asked of it, run again, and differentiated."""
    with head.autocast:
        outs = [one.of(z[part.start - chunk.start : part.stop - chunk.start], part)[0] for one, _, part in asked]
    dys = [dy[part.start - one.start : part.stop - one.start] for one, dy, part in asked]
    with no_autocast():
        return torch.autograd.grad(outs, z, dys)[0]
