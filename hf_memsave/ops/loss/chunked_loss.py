r"""``chunked_loss``: a language model's head and its cross-entropy, a few rows at a time.

Kept for backward, with T tokens, V words and x ``[T, H]`` the head's input::

    eager    the logits in the model's dtype, in fp32, and their log-softmax: up to 10 V bytes a token, 14 V at the peak
    here     dx; of a trained head its gradient, or dz of all rows, 2 V bytes a token; one chunk at the peak

With z = head(x), p = softmax(z) and e the target's one-hot row, ``loss_i = -log p_t`` and ``dz_i = p - e``: both are
computed in forward, chunk after chunk, and equal stock's up to the order of fp32 sums (see ``sums``). Gradients are
divided before they are rounded: by the number of labels, or of a sum by the divisor that the forward is given
(``num_items_in_batch``). Source: Wijmans et al. (2024), arXiv:2411.09009; Hsu et al. (2024), arXiv:2410.10989.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import islice
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hf_memsave.device import HALVES, is_autocast, memory_of
from hf_memsave.ops.fused import cross_entropy as fused
from hf_memsave.ops.loss.head import HeadCall, gradients
from hf_memsave.ops.loss.rows import LOGITS, ByRow, Node, Part, Precomputed, parts_of, values
from hf_memsave.ops.loss.sums import Sums, gradient
from hf_memsave.ops.op import once_differentiable
from hf_memsave.tape import current
from hf_memsave.tape.as_stock import run_counted
from hf_memsave.tape.content import same
from hf_memsave.tape.private import no_autocast, no_modes, stands_for_many

#: Bytes of a chunk; logits that take no more in fp32 are not computed in chunks.
CHUNK = 128 * 2**20
#: On a device: rows of a product's tile; the least rows of a chunk, as each reads the whole head, if they take at most
#: 1/32 of the memory (not of what is free: the number of rows, and so the order of sums, would differ between runs).
TILE, ROWS, _PART = 128, 1024, 32
_divisor: ContextVar[Tensor | float | None] = ContextVar("num_items_in_batch", default=None)


@contextlib.contextmanager
def divided_by(number: Tensor | float | None) -> Iterator[None]:
    """Note for cross-entropies in this context that their forward divides its sum of losses by ``number``, if given."""
    token = _divisor.set(number)
    try:
        yield
    finally:
        _divisor.reset(token)


def cross_entropy(x: Any, target: Tensor, ignored: int, is_sum: bool) -> Tensor:
    """Compute ``F.cross_entropy`` of unread logits, its sum or mean, and its gradient, a chunk of rows at a time."""
    call, node, place = x.call, x.cell.node, x.place
    if current() is None:  # not in the model's own forward, where the host would wait for the device
        call.check(x.hidden)

    def stock(hidden: Tensor) -> Tensor:
        z = call.logits(hidden).reshape(-1, call.words)
        part = next(parts_of(place.flat, call.count, hidden))
        return F.cross_entropy(values(node, part, lambda: z[part.index]), target.reshape(-1), ignore_index=ignored)

    run = partial(_ChunkedLoss.apply, x, target.reshape(-1), ignored, is_sum)
    return cast("Tensor", run_counted(current(), "cross_entropy", run, stock, (x.hidden,), call.module))


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, target: Tensor, ignored: int, is_sum: bool) -> Tensor:
        call, node, dtype, hidden = x.call, x.cell.node, x.dtype, x.hidden
        wide = torch.promote_types(dtype, torch.float32)
        losses = torch.empty(len(target), dtype=wide, device=hidden.device)
        count = _count(target, ignored, is_sum, wide)
        rows = rows_of_chunk(call.words * (dtype.itemsize + 2 * wide.itemsize), hidden)

        def dz_of(z: Tensor, part: Part) -> Tensor:
            losses[part.here], dz = _of_chunk(call.fuses_loss, node, z, target[part.here], ignored, count)
            return dz

        wanted, parts = call.wanted(), parts_of(x.place.flat, rows, hidden)
        dx, kept = in_chunks(call, hidden, parts, wanted, dz_of, hidden.requires_grad, len(target), node)
        ctx.save_for_backward(hidden, dx, count, target, *(tensor for tensors in kept for tensor in tensors))
        ctx.set_materialize_grads(False)
        ctx.kept = [(p, len(tensors)) for tensors, p in zip(kept, wanted, strict=True)]
        ctx.ignored, ctx.is_sum, ctx.of, ctx.like = ignored, is_sum, x.of_node, (call, node, dtype, x.place)
        loss = losses.sum() if is_sum else losses.sum() / count
        return loss.to(torch.float32 if dtype in HALVES and is_autocast(hidden) else dtype)  # autocast widens a loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        hidden, dx, count, target, *tensors = ctx.saved_tensors
        call, node, dtype, place = ctx.like
        factor, divisor = dy.to(count.dtype), None if ctx.is_sum else count
        if stands_for_many(dy):  # a batch of gradients has no place in a node
            z = ctx.of(hidden, call, node, dtype, place).numbers().movedim(place.dim, -1)
            dz = _gradient(z.reshape(-1, call.words), target.unsqueeze(-1), factor, divisor, ctx.ignored)
            return dz.view(z.shape).movedim(-1, place.dim), None, None, None

        def finish() -> tuple[Tensor | None, dict[int, Tensor | None]]:
            rest, whole = iter(tensors), factor * count if ctx.is_sum else factor
            found = {id(p): gradient(list(islice(rest, n)), whole, p.dtype) for p, n in ctx.kept}
            return None if dx is None else (dx * whole).to(dx.dtype), found

        by_row = ByRow(place.by_row(target.view(place.rows.shape), call.count))
        kept = Precomputed(finish, node, place.flat)
        made = Node(partial(_gradient, ignored=ctx.ignored), node, by_row, factor, divisor, kept=kept)
        return ctx.of(hidden, call, made, dtype, place), None, None, None


def _gradient(z: Tensor, target: Tensor, dy: Tensor, divisor: Tensor | None, ignored: int) -> Tensor:
    """Compute the gradient of logits ``[n, V]`` with classes ``[n, 1]``, from dy of the losses' sum / ``divisor``."""
    scale = dy if divisor is None else dy / divisor
    is_counted = target != ignored
    p = torch.softmax(z, -1, dtype=torch.promote_types(z.dtype, torch.float32))
    dz = p.scatter_add(-1, target.where(is_counted, 0), -torch.ones_like(target, dtype=p.dtype))
    return (dz * scale.where(is_counted, 0)).to(z.dtype)


def in_chunks(
    call: HeadCall, hidden: Tensor, parts: Iterable[Part], wanted: Sequence[Tensor],
    dz_of: Callable[[Tensor, Part], Tensor], wants_dx: bool, rows: int, node: Node = LOGITS,
) -> tuple[Tensor | None, list[tuple[Tensor, ...]]]:  # fmt: skip
    """Return the gradient of a head's input, and what is kept of its parameters'; ``dz_of`` computes a part's dz."""
    hidden = hidden.detach().reshape(-1, hidden.shape[-1])
    empty = torch.empty_like if rows == len(hidden) else torch.zeros_like  # where some rows are in no part
    dx, sums = empty(hidden) if wants_dx else None, Sums(wanted, torch.promote_types(hidden.dtype, torch.float32), rows)
    with no_modes(), saved_tensors_hooks(same, same):
        for part in parts:
            x = hidden[part.index].detach().requires_grad_()
            with torch.enable_grad(), sums.of_linears(call.module):
                logits = call.logits(x.view_as(x), is_chunk=True)  # autocast would share one cast of a leaf
                with no_autocast():
                    logits = values(node, part, partial(Tensor.view_as, logits, logits))
            with no_autocast():  # as outside of the forward, where stock's backward runs
                with torch.no_grad():
                    dz = dz_of(logits.detach(), part)
                found, *others = gradients(logits, [x, *wanted], dz)
            del logits, dz
            for one, other in zip(sums.of.values(), others, strict=True):
                if other is not None:
                    one.total().add_(other)
            if dx is not None and found is not None:
                dx[part.index] = found
            del found, others
    return dx, [one.kept() for one in sums.of.values()]


def rows_of_chunk(of_row: int, x: Tensor) -> int:
    """Return how many rows of ``of_row`` bytes a chunk has on the device of x."""
    rows = max(1, CHUNK // of_row)
    if x.is_cpu:
        return rows
    memory = memory_of(x)
    return max(rows // TILE * TILE, ROWS if memory is None or ROWS * of_row <= memory // _PART else TILE)


def _of_chunk(fuses: bool, node: Node, z: Tensor, target: Tensor, ignored: int, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's loss, and its gradient over ``count`` in the dtype of z: if a kernel can, written over z."""
    if fuses and fused.suits(node, z):
        return fused.loss_and_gradient(z, target, ignored, count)
    minus_z = F.nll_loss(z, target, ignore_index=ignored, reduction="none")  # refuses what is no class
    is_counted = target != ignored
    top, place = z.max(-1)
    top = top.to(count.dtype)
    p = torch.softmax(z, -1, dtype=count.dtype)
    log_sum = -p.gather(-1, place.unsqueeze(-1)).squeeze(-1).log()  # of exp(z - top)
    losses = top + minus_z + log_sum
    scale = (1 / count).where(is_counted, 0).unsqueeze(-1)
    dz = p.mul_(scale).scatter_add_(-1, target.where(is_counted, 0).unsqueeze(-1), -scale)
    return losses.where(is_counted, 0), dz.to(z.dtype)


def _count(target: Tensor, ignored: int, is_sum: bool, wide: torch.dtype) -> Tensor:
    """Return what gradients are divided by before they are rounded, and a mean's sum of losses."""
    number = _divisor.get() if is_sum else None
    if isinstance(number, Tensor) and number.dim() == 0:
        return number.detach().to(target.device, wide)
    if isinstance(number, (int, float)):  # filled in: a copy from the host would wait for the device
        return torch.full((), float(number), dtype=wide, device=target.device)
    return (target != ignored).sum().to(wide)
