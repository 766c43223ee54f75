r"""Rotary position embedding in the halves' convention of ``transformers``, both directions.

Of each head, with x₁ and x₂ the halves of its first R elements, and c, s their cosines and sines::

    y₁ = x₁ c₁ - x₂ s₁            dx₁ = dy₁ c₁ + dy₂ s₂
    y₂ = x₂ c₂ + x₁ s₂            dx₂ = dy₂ c₂ - dy₁ s₁

What comes after the first R elements is copied. Nothing but c and s is kept. Bytes an element in half precision: 4,
and c and s once for all heads. Source: Su et al. (2021), arXiv:2104.09864.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._define import define
from ._launch import ceil_div, launch


@triton.jit
def rotary_kernel(
    x_ptr, c_ptr, s_ptr, y_ptr, length, heads, x_batch, x_head, x_row, y_batch, y_head, y_row, c_batch, c_row,
    s_batch, s_row, R: tl.constexpr, D: tl.constexpr, BACKWARD: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """One token and HEADS of its heads; BACKWARD turns the other way."""
    batch = (tl.program_id(0) // length).to(tl.int64)
    token = (tl.program_id(0) % length).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None].to(tl.int64)
    x_ptr += batch * x_batch + token * x_row + head * x_head
    y_ptr += batch * y_batch + token * y_row + head * y_head
    c_ptr += batch * c_batch + token * c_row
    s_ptr += batch * s_batch + token * s_row
    i = tl.arange(0, HALF)[None, :]
    in_half = i < R // 2
    inside = (head < heads) & in_half
    c1 = tl.load(c_ptr + i, mask=in_half, other=0.0).to(tl.float32)
    c2 = tl.load(c_ptr + R // 2 + i, mask=in_half, other=0.0).to(tl.float32)
    s1 = tl.load(s_ptr + i, mask=in_half, other=0.0).to(tl.float32)
    s2 = tl.load(s_ptr + R // 2 + i, mask=in_half, other=0.0).to(tl.float32)
    x1 = tl.load(x_ptr + i, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + R // 2 + i, mask=inside, other=0.0).to(tl.float32)
    if BACKWARD:
        tl.store(y_ptr + i, x1 * c1 + x2 * s2, mask=inside)
        tl.store(y_ptr + R // 2 + i, x2 * c2 - x1 * s1, mask=inside)
    else:
        tl.store(y_ptr + i, x1 * c1 - x2 * s1, mask=inside)
        tl.store(y_ptr + R // 2 + i, x2 * c2 + x1 * s2, mask=inside)
    if R < D:
        i = R + tl.arange(0, REST)[None, :]
        inside = (head < heads) & (i < D)
        tl.store(y_ptr + i, tl.load(x_ptr + i, mask=inside, other=0.0), mask=inside)


@functools.cache
def _tile(heads: int, width: int, turned: int) -> tuple[int, int, int]:
    """Of a program: elements of a half, heads, and elements of what is copied."""
    half = max(8, triton.next_power_of_2(turned // 2))
    block = min(triton.next_power_of_2(max(1, heads)), max(1, 2048 // (2 * half)))
    return half, block, max(8, triton.next_power_of_2(max(1, width - turned)))


def _rotary(x: Tensor, cos: Tensor, sin: Tensor, backward: bool, out: torch.dtype) -> Tensor:
    x, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, cos, sin))
    y = _fake(x, cos, sin, backward, out)
    (batches, heads, length, width), turned = x.shape, cos.shape[-1]
    half, block, rest = _tile(heads, width, turned)
    strides = [step for t in (x, y) for step in t.stride()[:3]]
    strides += [step for t in (cos, sin) for step in t.expand(batches, length, turned).stride()[:2]]
    launch(
        rotary_kernel, (batches * length, ceil_div(heads, block)), (x, cos, sin, y, length, heads, *strides),
        {"R": turned, "D": width, "BACKWARD": backward, "HEADS": block, "HALF": half, "REST": rest},
        max(1, min(4, block * half // 256)),
    )  # fmt: skip
    return y


def _fake(x: Tensor, cos: Tensor, sin: Tensor, backward: bool, out: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=out)


_op = define("rotary(Tensor x, Tensor cos, Tensor sin, bool backward, ScalarType out) -> Tensor", _rotary, _fake)


def rotary_forward(x: Tensor, cos: Tensor, sin: Tensor, out: torch.dtype | None = None) -> Tensor:
    """``x * cos + rotate_half(x) * sin`` without autograd.

    Args:
        x: ``[batch, heads, length, D]``, float32, bfloat16 or float16, any strides.
        cos: ``[batch or 1, length, R]`` with R even and at most D: what comes after is copied.
        sin: Like cos.
        out: The dtype of the result; x's, if None.

    Returns:
        Like x, in that dtype.

    Raises:
        ValueError: The shapes do not fit.
    """
    if x.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape or cos.shape[-1] % 2 or cos.shape[-1] > x.shape[-1]:
        shapes = tuple(x.shape), tuple(cos.shape), tuple(sin.shape)
        raise ValueError(
            f"expected [batch, heads, length, D] and two of [batch or 1, length, R], R even and at most D; got {shapes}"
        )
    return _op(x, cos, sin, False, out or x.dtype)


def rotary_backward(dy: Tensor, cos: Tensor, sin: Tensor, x: torch.dtype | None = None) -> Tensor:
    """The gradient of :func:`rotary_forward`, like dy, in the dtype ``x``; in dy's, if None."""
    return _op(dy, cos, sin, True, x or dy.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x * cos + rotate_half(x) * sin`` with x's gradient; keeps cos and sin. See :func:`rotary_forward`."""
    return _Rotary.apply(x, cos, sin)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotary_forward(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return rotary_backward(dy, *ctx.saved_tensors), None, None
