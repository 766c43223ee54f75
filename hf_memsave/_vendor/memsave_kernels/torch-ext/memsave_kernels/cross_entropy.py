r"""Cross-entropy that writes the gradient over the logits, and the same of a linear, chunk by chunk.

Of each row of logits l with its label t, and over the rows that are not ignored::

    loss = Σ (log Σ exp(l) - l_t) / count
    dl = (softmax(l) - [i = t]) / count             written over l in forward

Forward makes the gradient for an incoming gradient of 1; backward multiplies it by what really comes in, and reads and
writes nothing where that is 1. Of a linear, l is that of one chunk of rows at a time, and the gradients of its input
and its weight are made in forward too. Bytes a logit in half precision: 6, of which 2 are read a second time.
Source: Wijmans et al. (2024), arXiv:2411.09009, and Hsu et al. (2024), arXiv:2410.10989.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from ._define import define
from ._launch import ceil_div, dense, launch, processors

_BLOCK = 4096
#: Logits of a chunk.
_CHUNK = 2**26


@triton.jit
def _higher(x, most, total):
    """The largest of x and what was before, and Σ exp(x - largest) likewise."""
    higher = tl.maximum(most, tl.max(x, axis=0))
    low = tl.where(higher == -float("inf"), 0.0, higher)
    return higher, total * tl.exp(most - low) + tl.sum(tl.exp(x - low), axis=0)


@triton.jit
def _slope(x, is_label, most, total, weight, is_counted):
    """The gradient dl."""
    return tl.where(is_counted, weight * (tl.exp(x - most) / total - tl.where(is_label, 1.0, 0.0)), 0.0)


@triton.jit
def cross_entropy_kernel(l_ptr, label_ptr, count_ptr, loss_ptr, ignored, columns, BLOCK: tl.constexpr):
    """The loss of one row, not divided; and dl over l: of whole eights of the tensor by wide loads, and of its ends."""
    row = tl.program_id(0).to(tl.int64)
    eighth = (row * columns + 7) // 8 * 8
    head = tl.minimum((eighth - row * columns).to(tl.int32), columns)
    body = (columns - head) // 8 * 8
    body_ptr = l_ptr + eighth
    l_ptr += row * columns
    label = tl.load(label_ptr + row)
    is_counted = (label != ignored) & (label >= 0) & (label < columns)
    at_label = tl.load(l_ptr + label, mask=is_counted, other=0.0).to(tl.float32)
    place = tl.arange(0, 16)
    end = tl.where(place < 8, place, head + body + place - 8)
    is_end = (end < columns) & ((place < head) | (place >= 8))
    ends = tl.load(l_ptr + end, mask=is_end, other=-float("inf")).to(tl.float32)
    most, total = _higher(ends, -float("inf"), 0.0)
    for first in range(0, body, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(body_ptr + at, mask=at < body, other=-float("inf")).to(tl.float32)
        most, total = _higher(x, most, total)
    tl.store(loss_ptr + row, tl.where(is_counted, tl.log(total) - (at_label - most), 0.0))
    weight = 1.0 / tl.load(count_ptr)
    tl.store(l_ptr + end, _slope(ends, end == label, most, total, weight, is_counted), mask=is_end)
    for first in range(0, body, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(body_ptr + at, mask=at < body, other=-float("inf")).to(tl.float32)
        tl.store(body_ptr + at, _slope(x, head + at == label, most, total, weight, is_counted), mask=at < body)


@triton.jit
def scale_kernel(x_ptr, by_ptr, n, BLOCK: tl.constexpr):
    """Multiplies x by one number, in place; touches nothing where that is 1."""
    by = tl.load(by_ptr).to(tl.float32)
    if by != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
        tl.store(x_ptr + at, by * x, mask=at < n)


def _cross_entropy(logits: Tensor, labels: Tensor, count: Tensor, ignored: int) -> Tensor:
    losses = _cross_entropy_fake(logits, labels, count, ignored)
    args = (logits, *dense(labels), count, losses, ignored, logits.shape[1])
    most = _BLOCK if logits.shape[0] >= 4 * processors(logits) else 4 * _BLOCK  # a processor with few rows waits less
    block = min(most, max(16, triton.next_power_of_2(logits.shape[1])))
    launch(cross_entropy_kernel, (logits.shape[0],), args, {"BLOCK": block}, max(4, block // 512))
    increment_version(logits)  # who keeps them for backward is told
    return losses


def _cross_entropy_fake(logits: Tensor, labels: Tensor, count: Tensor, ignored: int) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


def _scale(x: Tensor, by: Tensor) -> None:
    launch(scale_kernel, (ceil_div(x.numel(), 1024),), (x, by, x.numel()), {"BLOCK": 1024})
    increment_version(x)


_cross_entropy_op = define(
    "cross_entropy_(Tensor(a!) logits, Tensor labels, Tensor count, int ignored) -> Tensor",
    _cross_entropy, _cross_entropy_fake,
)  # fmt: skip
_scale_op = define("scale_(Tensor(a!) x, Tensor by) -> ()", _scale, lambda x, by: None)


def cross_entropy_forward_(logits: Tensor, labels: Tensor, count: Tensor, ignored: int = -100) -> Tensor:
    """The losses of the rows; writes the gradient of their sum over ``count`` into ``logits``.

    Args:
        logits: ``[rows, V]``, contiguous, float32, bfloat16 or float16. Overwritten.
        labels: ``[rows]``, int64.
        count: What the sum is divided by: float32 with one element, on the same device.
        ignored: The label of rows that count for nothing; a label outside of [0, V) does likewise.

    Returns:
        ``[rows]``, float32, not divided.

    Raises:
        ValueError: The logits are not a contiguous matrix.
    """
    if logits.dim() != 2 or not logits.is_contiguous():
        raise ValueError(f"expected contiguous logits [rows, V], got {tuple(logits.shape)}, strides {logits.stride()}")
    return _cross_entropy_op(logits, labels, count, ignored)


def cross_entropy_scale_(gradient: Tensor, by: Tensor) -> None:
    """Multiplies ``gradient``, contiguous, by the one element of ``by``; reads and writes nothing where that is 1."""
    _scale_op(gradient, by)


def _count_of(labels: Tensor, count: Tensor | float | None, ignored: int) -> Tensor:
    if count is None:
        return (labels != ignored).sum(dtype=torch.float32)
    if isinstance(count, Tensor):
        return count.to(labels.device, torch.float32)
    return torch.full((), count, dtype=torch.float32, device=labels.device)


def cross_entropy_(logits: Tensor, labels: Tensor, count: Tensor | float | None = None, ignored: int = -100) -> Tensor:
    """The mean cross-entropy; its gradient takes the place of the logits, which nobody else may read afterwards.

    Args:
        logits: As in :func:`cross_entropy_forward_`, and no leaf.
        labels: ``[rows]``, int64.
        count: What the sum of the losses is divided by; the number of labels that are not ignored, if None.
        ignored: The label of rows that count for nothing.

    Returns:
        The loss, a float32 number. Its backward runs once.
    """
    return _CrossEntropy.apply(logits, labels, _count_of(labels, count, ignored), ignored)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, count: Tensor | float | None = None,
    ignored: int = -100, rows: int | None = None,
) -> Tensor:  # fmt: skip
    """The mean cross-entropy of ``x @ weight.T + bias``, of which only one chunk of rows exists at a time.

    The weight's gradient is summed in float32 over chunks, each rounded to weight's dtype once.

    Args:
        x: ``[tokens, H]``, float32, bfloat16 or float16.
        weight: ``[V, H]``, in x's dtype.
        labels: ``[tokens]``, int64.
        bias: ``[V]``, or None.
        count: As in :func:`cross_entropy_`.
        ignored: As there.
        rows: Of a chunk; as many as have 2^26 logits, if None.

    Returns:
        The loss, a float32 number. Its backward runs once.
    """
    rows = rows or max(1, _CHUNK // weight.shape[0])
    return _LinearCrossEntropy.apply(x, weight, bias, labels, _count_of(labels, count, ignored), ignored, rows)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, count: Tensor, ignored: int) -> Tensor:
        losses = cross_entropy_forward_(logits.detach(), labels, count, ignored)
        ctx.save_for_backward(logits.detach())
        return losses.sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        return _scaled(ctx, dloss)[0], None, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, count: Tensor, ignored: int, rows: int
    ) -> Tensor:
        wants_x, wants_w, wants_b = ctx.needs_input_grad[:3]
        dx = torch.empty_like(x) if wants_x else None
        dw = torch.zeros_like(weight, dtype=torch.float32) if wants_w else None
        db = torch.zeros_like(bias, dtype=torch.float32) if wants_b and bias is not None else None
        loss = torch.zeros((), device=x.device)
        with torch.autocast(x.device.type, enabled=False):
            for start in range(0, x.shape[0], rows):
                part = x[start : start + rows]
                logits = torch.nn.functional.linear(part, weight, bias)
                loss += cross_entropy_forward_(logits, labels[start : start + rows], count, ignored).sum()
                if dx is not None:
                    torch.mm(logits, weight, out=dx[start : start + rows])
                if dw is not None:
                    dw += logits.T @ part
                if db is not None:
                    db += logits.sum(0, dtype=torch.float32)
        ctx.save_for_backward(dx, *(None if t is None else t.to(weight.dtype) for t in (dw, db)))
        return loss / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        return *_scaled(ctx, dloss), None, None, None, None


def _scaled(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
    """What forward made, times the incoming gradient: in place, so a second backward is refused by autograd."""
    found = ctx.saved_tensors
    for gradient in found:
        if gradient is not None:
            cross_entropy_scale_(gradient, dloss)
    return found
