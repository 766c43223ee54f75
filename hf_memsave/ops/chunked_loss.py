r"""``chunked_loss``: a language model's head and its cross-entropy, a few rows at a time.

Kept for backward, with T tokens, V words and x ``[T, H]`` the head's input::

    eager    the logits in the model's dtype, in fp32, and their log-softmax: up to 10 V bytes a token, 14 V at the peak
    here     dx; of a trained head its gradient, or dz of all rows, 2 V bytes a token; one chunk at the peak

With z = head(x), p = softmax(z), e the target's one-hot row, s the label smoothing and w the class weights::

    loss_i = -(1 - s) w_t log p_t - s/V sum_v w_v log p_v
    dz_i   = p ((1 - s) w_t + s/V sum_v w_v) - (1 - s) w_t e - s/V w

Both are computed in forward, chunk after chunk, so the head runs as often as in stock. While all logits fit in one
chunk, stock's own expression runs, bit for bit. Beyond, all equals stock's up to the order of fp32 sums; how gradients
are summed over chunks, see ``sums``. Source: Wijmans et al. (2024), arXiv:2411.09009; Hsu et al. (2024),
arXiv:2410.10989.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hf_memsave.device import HALVES, has_numbers, is_autocast, waits
from hf_memsave.ops.fused import cross_entropy as fused
from hf_memsave.ops.head import Head
from hf_memsave.ops.lazy_loss import LazyLoss
from hf_memsave.ops.op import once_differentiable
from hf_memsave.ops.sums import Sums, gradient
from hf_memsave.tape import current
from hf_memsave.tape.as_stock import counted
from hf_memsave.tape.private import no_modes

#: Bytes that a chunk takes; and that all logits may take in fp32 where there are no chunks.
CHUNK = 128 * 2**20


class _Options(NamedTuple):
    """What ``F.cross_entropy`` is called with, the dtype of its result, and by what that is divided."""

    weight: Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float
    dtype: torch.dtype
    divisor: Any = None


def cross_entropy(
    hidden: Tensor,
    head: Head,
    parameters: Sequence[Tensor],
    like: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """``F.cross_entropy(head(hidden), target, ...)``, a chunk of rows at a time.

    Args:
        hidden: ``[T, H]``.
        head: What makes the logits.
        parameters: Those of the head that want a gradient.
        like: Of the shape ``[T, V]`` and dtype of the logits.
        target: Classes ``[T]``.
        weight: Of each class ``[V]``, or None.
        size_average: Old; must be None.
        ignore_index: The class of rows that count for nothing.
        reduce: Old; must be None.
        reduction: "mean" or "sum"; "none" (``[T]``) where the head wants no gradient.
        label_smoothing: In [0, 1].

    Returns:
        The loss, in the logits' dtype, or in fp32 under autocast; in a model's forward, a sum is lazy. None where this
        is asked for what it does not know.

    Raises:
        IndexError: On CPU, a target is no class, as in stock.
    """
    is_known = reduction in ("mean", "sum") or (reduction == "none" and not parameters)
    is_plain = like.dim() == 2 and target.shape == like.shape[:1] and target.dtype == torch.int64
    wants_weight = weight is not None and weight.requires_grad
    if not (is_known and is_plain) or wants_weight or size_average is not None or reduce is not None:
        return None
    if has_numbers(target) and not waits(target):  # on CUDA a kernel refuses it, as in stock
        wrong = target[(target != ignore_index) & ((target < 0) | (target >= like.shape[1]))]
        if len(wrong):
            raise IndexError(f"Target {wrong[0].item()} is out of bounds.")
    dtype = torch.float32 if like.dtype in HALVES and is_autocast(hidden) else like.dtype  # autocast widens a loss
    options = _Options(weight, ignore_index, reduction, label_smoothing, dtype)
    of_logits, words, tape = like.dtype, like.shape[-1], current()

    def stock(x: Tensor) -> Tensor:
        head.state.check()
        z = head.compute(x)
        head.state.renew()  # some adapters write to their own weights
        return F.cross_entropy(
            z, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )

    def compute(divisor: Any) -> Tensor:
        given = options._replace(divisor=divisor)
        run = partial(_ChunkedLoss.apply, hidden, target, head, given, of_logits, words, *parameters)
        now = current()
        is_counted = now is not None and now.ledger is not None
        loss: Tensor = counted(now, "cross_entropy", run, stock, (hidden,), head.module) if is_counted else run()
        return loss

    if tape is not None and reduction == "sum" and dtype in (torch.float32, torch.float64):
        return LazyLoss.of(compute, dtype, [hidden, *parameters], tape)
    return compute(None)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, target: Tensor, head: Any, options: _Options, dtype: Any, words: int, *parameters: Any
    ) -> Tensor:
        wide = dtype if dtype == torch.float64 else torch.float32
        losses = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        dx = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        wanted = [p for p, needs in zip(parameters, ctx.needs_input_grad[6:], strict=True) if needs]
        sums = Sums(wanted, wide, len(hidden))
        itemsize = torch.empty(0, dtype=wide).itemsize + 2 * torch.empty(0, dtype=dtype).itemsize
        rows = max(1, CHUNK // (words * itemsize))
        count = _count(target, options, wide)
        head.state.check()
        with no_modes(), saved_tensors_hooks(_same, _same):
            starts = range(0, len(hidden), rows)
            for start in starts if has_numbers(hidden) else starts[:2]:  # the others have as many bytes
                part = slice(start, start + rows)
                x = hidden[part].detach().requires_grad_()
                with torch.enable_grad():
                    logits = head.compute(x.view_as(x))  # autocast would share one cast of a leaf
                losses[part], dz = _of_chunk(head, logits.detach(), target[part], options, count)
                found = sums.add(logits, x, dz)
                del logits, dz
                if dx is not None and found is not None:
                    dx[part] = found
                del found
        head.state.renew()
        kept = sums.kept()
        ctx.save_for_backward(dx, *(tensor for tensors in kept for tensor in tensors))
        ctx.set_materialize_grads(False)
        ctx.wide, ctx.kept = wide, [(len(tensors), p.dtype) for tensors, p in zip(kept, wanted, strict=True)]
        return (losses if options.reduction == "none" else losses.sum() / count).to(options.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx, *tensors = ctx.saved_tensors
        factor, rest = dy.to(ctx.wide), iter(tensors)
        found = iter([gradient(list(islice(rest, count)), factor, dtype) for count, dtype in ctx.kept])
        by_row = factor.unsqueeze(-1) if factor.dim() else factor
        first = None if dx is None else (dx * by_row).to(dx.dtype)
        return first, None, None, None, None, None, *(next(found) if n else None for n in ctx.needs_input_grad[6:])


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _of_chunk(head: Head, z: Tensor, target: Tensor, options: _Options, count: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`_loss_and_gradient`, by one kernel, and in the place of z, where that can be."""
    is_known = head.fuses_loss and options.weight is None and options.label_smoothing == 0
    if is_known and fused.suits(head.steps, z):
        return fused.loss_and_gradient(z, target, options.ignore_index, count)
    return _loss_and_gradient(z, target, options, count)


def _loss_and_gradient(z: Tensor, target: Tensor, options: _Options, count: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row, the loss before and the gradient after the division by ``count``; the latter in the dtype of z."""
    wide, smoothing, words = count.dtype, options.label_smoothing, z.shape[-1]
    is_counted = target != options.ignore_index
    index = target.where(is_counted, 0).unsqueeze(-1)
    weight = None if options.weight is None else options.weight.to(wide)
    of_target = 1.0 - smoothing if weight is None else (1.0 - smoothing) * weight[index]
    total = 1.0 if weight is None else weight.mean()
    top, place = z.max(-1, keepdim=True)
    top, below = top.to(wide), top.to(wide) - z.gather(-1, index)
    p = _softmax(z, top)
    log_sum = -p.gather(-1, place).log()  # of exp(z - top)
    loss = of_target * (below + log_sum)
    if smoothing:
        mean = z.mean(-1, keepdim=True, dtype=wide) if weight is None else (z.to(wide) @ weight / words).unsqueeze(-1)
        loss = loss + smoothing * (total * (top + log_sum) - mean)
    if smoothing or weight is not None:
        p.mul_(of_target + smoothing * total)
    p.scatter_add_(-1, index, torch.full_like(loss, -1.0) * of_target)
    if smoothing:
        p.sub_(smoothing / words if weight is None else smoothing / words * weight)
    p.div_(count.where(is_counted, torch.inf).unsqueeze(-1))
    return loss.squeeze(-1).masked_fill(~is_counted, 0.0), p.to(z.dtype)


def _softmax(z: Tensor, top: Tensor) -> Tensor:
    """In the dtype of top, the largest of each row; of a narrower z in the place of its conversion."""
    if z.dtype == top.dtype:
        return torch.softmax(z, -1)
    p = z.to(top.dtype).sub_(top).exp_()
    return p.div_(p.sum(-1, keepdim=True))


def _count(target: Tensor, options: _Options, wide: torch.dtype) -> Tensor:
    """What the sum of losses is divided by; and each gradient, before it is rounded to its dtype."""
    if isinstance(options.divisor, Tensor):
        return options.divisor.to(target.device, wide)
    if options.divisor is not None:  # filled in: a copy from the host would wait for the device
        return torch.full((), float(options.divisor), dtype=wide, device=target.device)
    if options.reduction != "mean":
        return torch.ones((), dtype=wide, device=target.device)
    is_counted = target != options.ignore_index
    if options.weight is None:
        return is_counted.sum().to(wide)
    return options.weight.to(wide)[target.where(is_counted, 0)].masked_fill(~is_counted, 0.0).sum()
