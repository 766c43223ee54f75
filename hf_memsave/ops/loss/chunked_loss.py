r"""``chunked_loss``: a language model's head and its cross-entropy, a few rows at a time.

Kept for backward, with T tokens, V words and x ``[T, H]`` the head's input::

    eager    the logits in the model's dtype, in fp32, and their log-softmax: up to 10 V bytes a token, 14 V at the peak
    here     dx; of a trained head its gradient, or dz of all rows, 2 V bytes a token; one chunk at the peak

With z = head(x), p = softmax(z) and e the target's one-hot row::

    loss_i = -log p_t
    dz_i   = p - e

Both are computed in forward, chunk after chunk. While all logits fit in one chunk, stock's own expression runs, bit for
bit; beyond, all equals stock's up to the order of fp32 sums (see ``sums``). Gradients of a mean are divided before they
are rounded, and so are those of a sum: by what the forward divides it by (``num_items_in_batch``), or else by the
number of labels. Source: Wijmans et al. (2024), arXiv:2411.09009; Hsu et al. (2024), arXiv:2410.10989.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hf_memsave.device import HALVES, has_numbers, is_autocast, memory_of
from hf_memsave.ops.fused import cross_entropy as fused
from hf_memsave.ops.loss.head import Head, gradients
from hf_memsave.ops.loss.sums import Sums, gradient
from hf_memsave.ops.op import once_differentiable
from hf_memsave.tape import current
from hf_memsave.tape.as_stock import counted
from hf_memsave.tape.content import same
from hf_memsave.tape.private import no_autocast, no_modes

#: Bytes that a chunk takes; and that all logits may take in fp32 where there are no chunks.
CHUNK = 128 * 2**20
#: Rows of a product's tile on a device; and of a chunk there, which reads all of the head, while it takes so small a
#: part of the device's memory. (Not of what is free: rows, and by them the order of sums, would not be the next run's.)
TILE, ROWS, _PART = 128, 1024, 32
_divisor: ContextVar[Tensor | float | None] = ContextVar("num_items_in_batch", default=None)


@contextlib.contextmanager
def divided_by(number: Tensor | float | None) -> Iterator[None]:
    """Where a forward divides its sum of losses by ``number``, if that is one."""
    token = _divisor.set(number)
    try:
        yield
    finally:
        _divisor.reset(token)


class _Options(NamedTuple):
    """What ``F.cross_entropy`` takes after logits and targets."""

    weight: Tensor | None = None
    size_average: Any = None
    ignore_index: int = -100
    reduce: Any = None
    reduction: str = "mean"
    label_smoothing: float = 0.0


def cross_entropy(hidden: Tensor, head: Head, like: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    """``F.cross_entropy(head(hidden), target, *args, **kwargs)``, a chunk of rows at a time.

    ``hidden`` is ``[T, H]``, ``target`` ``[T]``, and ``like`` has the shape ``[T, V]`` and dtype of the logits.

    Returns:
        The loss, in the logits' dtype, or in fp32 under autocast. None for what it does not know: what is deprecated,
        targets that are no classes, class weights, label smoothing, and no reduction where the head wants a gradient.
    """
    options, parameters = _Options(*args, **kwargs), head.parameters()
    is_known = options.reduction in ("mean", "sum") or (options.reduction == "none" and not parameters)
    is_plain = like.dim() == 2 and target.shape == like.shape[:1] and target.dtype == torch.int64
    is_weighed = options.weight is not None or options.label_smoothing != 0
    is_old = options.size_average is not None or options.reduce is not None
    if not (is_known and is_plain) or is_weighed or is_old:
        return None
    run = partial(_ChunkedLoss.apply, hidden, target, head, options, (like.shape[1], like.dtype), *parameters)

    def stock(x: Tensor) -> Tensor:
        return F.cross_entropy(head(x), target, **options._asdict())

    return counted(current(), "cross_entropy", run, stock, (hidden,), head.module)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, target: Tensor, head: Head, options: _Options, geometry: Any, *parameters: Tensor
    ) -> Tensor:
        words, dtype = geometry
        wide = torch.promote_types(dtype, torch.float32)
        losses = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        wanted = [p for p, needs in zip(parameters, ctx.needs_input_grad[5:], strict=True) if needs]
        count = _count(target, options, wide)
        rows = rows_of_chunk(words * (dtype.itemsize + 2 * wide.itemsize), hidden)
        starts = range(0, len(hidden), rows)
        starts = starts if has_numbers(hidden) else starts[:2]  # the others have as many bytes
        parts = (slice(start, start + rows) for start in starts)

        def dz_of(z: Tensor, part: slice) -> Tensor:
            losses[part], dz = _of_chunk(head, z, target[part], options, count)
            return dz

        dx, kept = in_chunks(head, hidden, parts, wanted, wide, dz_of, ctx.needs_input_grad[0])
        ctx.save_for_backward(dx, count, *(tensor for tensors in kept for tensor in tensors))
        ctx.set_materialize_grads(False)
        ctx.kept = [(len(tensors), p.dtype) for tensors, p in zip(kept, wanted, strict=True)]
        ctx.is_sum = options.reduction == "sum"
        loss = losses if options.reduction == "none" else losses.sum()
        loss = loss / count if options.reduction == "mean" else loss
        return loss.to(torch.float32 if dtype in HALVES and is_autocast(hidden) else dtype)  # autocast widens a loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx, count, *tensors = ctx.saved_tensors
        factor, rest = dy.to(count.dtype), iter(tensors)
        factor = factor * count if ctx.is_sum else factor
        found = iter([gradient(list(islice(rest, n)), factor, dtype) for n, dtype in ctx.kept])
        by_row = factor.unsqueeze(-1) if factor.dim() else factor
        first = None if dx is None else (dx * by_row).to(dx.dtype)
        return first, None, None, None, None, *(next(found) if n else None for n in ctx.needs_input_grad[5:])


def in_chunks(
    head: Head,
    hidden: Tensor,
    parts: Iterable[slice],
    wanted: Sequence[Tensor],
    wide: torch.dtype,
    dz_of: Callable[[Tensor, slice], Tensor],
    wants_dx: bool,
    is_all: bool = True,
) -> tuple[Tensor | None, list[tuple[Tensor, ...]]]:
    """The gradient of ``hidden``, and what is kept of parameters': ``dz_of`` gives that of each part's logits."""
    empty = torch.empty_like if is_all else torch.zeros_like  # where some rows are in no part
    dx, sums = empty(hidden) if wants_dx else None, Sums(wanted, wide, len(hidden))
    head.check()
    with no_modes(), saved_tensors_hooks(same, same):
        for part in parts:
            x = hidden[part].detach().requires_grad_()
            with torch.enable_grad(), sums.of_linears(head.module):
                logits = head.of_chunk(x.view_as(x))  # autocast would share one cast of a leaf
            dz = dz_of(logits.detach(), part)
            with no_autocast():  # as outside of the forward, where stock's backward runs
                found, *others = gradients(logits, [x, *wanted], dz)
            del logits, dz
            for one, other in zip(sums.of.values(), others, strict=True):
                if other is not None:
                    one.total().add_(other)
            if dx is not None and found is not None:
                dx[part] = found
            del found, others
    head.renew()  # some adapters write to their own weights
    return dx, [one.kept() for one in sums.of.values()]


def rows_of_chunk(of_row: int, x: Tensor) -> int:
    """How many rows of so many bytes, on the device of x, a chunk has."""
    rows = max(1, CHUNK // of_row)
    if x.is_cpu:
        return rows
    memory = memory_of(x)
    return max(rows // TILE * TILE, ROWS if memory is None or ROWS * of_row <= memory // _PART else TILE)


def _of_chunk(head: Head, z: Tensor, target: Tensor, options: _Options, count: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's loss, and its gradient over ``count`` in the dtype of z; where it can be, by a kernel in its place."""
    ignored = options.ignore_index
    if head.fuses_loss and fused.suits(head.steps, z):
        return fused.loss_and_gradient(z, target, ignored, count)
    minus_z = F.nll_loss(z, target, ignore_index=ignored, reduction="none")  # refuses what is no class
    is_counted = target != ignored
    index = target.where(is_counted, 0)
    top, place = z.max(-1)
    top = top.to(count.dtype)
    p = torch.softmax(z, -1, dtype=count.dtype)
    log_sum = -p.gather(-1, place.unsqueeze(-1)).squeeze(-1).log()  # of exp(z - top)
    losses = top + minus_z + log_sum
    scale = (1 / count).where(is_counted, 0).unsqueeze(-1)
    dz = p.mul_(scale).scatter_add_(-1, index.unsqueeze(-1), -scale)
    return losses.where(is_counted, 0), dz.to(z.dtype)


def _count(target: Tensor, options: _Options, wide: torch.dtype) -> Tensor:
    """What each gradient is divided by before it is rounded; and a mean's sum of losses."""
    number = {"mean": None, "sum": _divisor.get(), "none": 1.0}[options.reduction]
    if isinstance(number, Tensor) and number.dim() == 0:
        return number.detach().to(target.device, wide)
    if isinstance(number, (int, float)):  # filled in: a copy from the host would wait for the device
        return torch.full((), float(number), dtype=wide, device=target.device)
    return (target != options.ignore_index).sum().to(wide)
