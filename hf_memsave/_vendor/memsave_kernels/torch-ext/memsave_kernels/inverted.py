r"""An activation whose backward starts from its output, with an indicator of one bit, or in the output's lowest bit.

With T where f has its minimum y_min, and P a polynomial of each side::

    y = f(x)            m = x < T
    s = √(y - y_min)
    f'(f⁻¹(y)) ≈ s y P_left(s)      x < T
                 s P_right(s)       x >= T, y <= cut
                 1                  x >= T, y > cut
    dx = dy f'(f⁻¹(y))

m is kept in a bit of its own, or replaces the lowest bit of y, which then is changed by at most one unit in the last
place; backward takes the middle of the two numbers that it may have been. Bytes an element in half precision: forward
4 and a bit, backward 6 and a bit. NaN stays NaN.
Source: Tempo (2022), arXiv:2210.10246, Section 3.1; InvAct (2024), Section 2.1 and Eqs. 1 to 9.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._activations import activation, check
from ._define import define
from ._launch import ceil_div, dense, launch, like
from .bits import BLOCK, store_packed, unpacked


class InverseFit(NamedTuple):
    """The fit of one activation.

    Attributes:
        turn: T.
        minimum: y_min, as a float32 and the rest.
        cut: The largest y that ``right`` is for.
        left: Coefficients of P_left, that of s⁰ first.
        right: Those of P_right.
    """

    turn: float
    minimum: tuple[float, float]
    cut: float
    left: tuple[float, ...]
    right: tuple[float, ...]


@triton.jit
def _polynomial(s, C: tl.constexpr, COUNT: tl.constexpr):
    total = s * 0.0 + C[COUNT - 1]
    for i in tl.static_range(1, COUNT):
        total = total * s + C[COUNT - 1 - i]
    return total


@triton.jit
def _slope(
    y, left, HIGH: tl.constexpr, REST: tl.constexpr, CUT: tl.constexpr, ULP: tl.constexpr,
    LEFT: tl.constexpr, COUNT_LEFT: tl.constexpr, RIGHT: tl.constexpr, COUNT_RIGHT: tl.constexpr,
):  # fmt: skip
    s = tl.sqrt(tl.minimum(tl.maximum((y - HIGH) - REST, ULP / 10), CUT - HIGH))
    near = s * tl.where(left != 0, y * _polynomial(s, LEFT, COUNT_LEFT), _polynomial(s, RIGHT, COUNT_RIGHT))
    near = tl.where((left == 0) & (y > CUT), 1.0, near)
    return tl.where(y == y, near, y)


@triton.jit
def inverted_forward_kernel(x_ptr, y_ptr, bits_ptr, n, ACT: tl.constexpr, TURN: tl.constexpr, BLOCK: tl.constexpr):
    """The output y, and the indicator in bits; in y where their pointer is None."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    left = x < TURN
    y = activation(x, ACT).to(y_ptr.dtype.element_ty)
    if bits_ptr is not None:
        store_packed(bits_ptr, left, tl.cdiv(n, 8), BLOCK)
    elif y_ptr.dtype.element_ty == tl.float32:
        y = ((y.to(tl.int32, bitcast=True) & -2) | left.to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        y = ((y.to(tl.int16, bitcast=True) & -2) | left.to(tl.int16)).to(y_ptr.dtype.element_ty, bitcast=True)
    tl.store(y_ptr + at, y, mask=at < n)


@triton.jit
def inverted_backward_kernel(
    dy_ptr, y_ptr, bits_ptr, dx_ptr, n,
    HIGH: tl.constexpr, REST: tl.constexpr, CUT: tl.constexpr, ULP: tl.constexpr,
    LEFT: tl.constexpr, COUNT_LEFT: tl.constexpr, RIGHT: tl.constexpr, COUNT_RIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient dx; the indicator is in y where the pointer of the bits is None."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    stored = tl.load(y_ptr + at, mask=at < n, other=0.0)
    dy = tl.load(dy_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    if bits_ptr is not None:
        y = stored.to(tl.float32)
        left = unpacked(bits_ptr, tl.cdiv(n, 8), BLOCK)
    else:
        if y_ptr.dtype.element_ty == tl.float32:
            word = stored.to(tl.int32, bitcast=True)
        else:
            word = stored.to(tl.int16, bitcast=True)
        left = (word & 1).to(tl.int32)
        y = (word & -2).to(y_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
        other = (word | 1).to(y_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
        y = tl.where(tl.abs(y) < float("inf"), y + (other - y) / 2, y)
    slope = _slope(y, left, HIGH, REST, CUT, ULP, LEFT, COUNT_LEFT, RIGHT, COUNT_RIGHT)
    tl.store(dx_ptr + at, dy * slope, mask=at < n)


def _forward(x: Tensor, act: str, turn: float, in_y: bool) -> tuple[Tensor, Tensor]:
    y, bits = _forward_fake(x, act, turn, in_y)
    args = (x.contiguous(), y, None if in_y else bits, x.numel())
    launch(inverted_forward_kernel, (ceil_div(x.numel(), BLOCK),), args, {"ACT": act, "TURN": turn, "BLOCK": BLOCK})
    return y, bits


def _forward_fake(x: Tensor, act: str, turn: float, in_y: bool) -> tuple[Tensor, Tensor]:
    return like(x), x.new_empty(0 if in_y else ceil_div(x.numel(), 8), dtype=torch.uint8)


def _backward(
    dy: Tensor, y: Tensor, bits: Tensor | None, minimum: list[float], cut: float, left: list[float], right: list[float]
) -> Tensor:
    dx = _backward_fake(dy, y, bits, minimum, cut, left, right)
    ulp = torch.finfo(y.dtype).eps * 2.0 ** math.floor(math.log2(-minimum[0])) * (2 if bits is None else 1)
    launch(
        inverted_backward_kernel, (ceil_div(y.numel(), BLOCK),), (*dense(dy, y, bits), dx, y.numel()),
        {"HIGH": minimum[0], "REST": minimum[1], "CUT": cut, "ULP": ulp, "LEFT": tuple(left), "COUNT_LEFT": len(left),
         "RIGHT": tuple(right), "COUNT_RIGHT": len(right), "BLOCK": BLOCK},
    )  # fmt: skip
    return dx


def _backward_fake(
    dy: Tensor, y: Tensor, bits: Tensor | None, minimum: list[float], cut: float, left: list[float], right: list[float]
) -> Tensor:
    return like(y)


_forward_op = define(
    "inverted_forward(Tensor x, str act, float turn, bool in_y) -> (Tensor, Tensor)", _forward, _forward_fake
)
_backward_op = define(
    "inverted_backward(Tensor dy, Tensor y, Tensor? bits, float[] minimum, float cut, float[] left, float[] right)"
    " -> Tensor",
    _backward, _backward_fake,
)  # fmt: skip


def inverted_forward(x: Tensor, act: str, turn: float, in_y: bool = False) -> tuple[Tensor, Tensor | None]:
    """An activation and on which side of its minimum x was.

    Args:
        x: Any shape, float32, bfloat16 or float16.
        act: One of ``ACTIVATIONS``.
        turn: Where the activation has its minimum.
        in_y: Whether the indicator goes into y's lowest bit.

    Returns:
        y, like x, and the indicator as uint8 ``[ceil(n / 8)]``, or None.
    """
    y, bits = _forward_op(x, check(act), turn, in_y)
    return y, None if in_y else bits


def inverted_backward(dy: Tensor, y: Tensor, bits: Tensor | None, fit: InverseFit) -> Tensor:
    """The gradient of :func:`inverted_forward` from its output.

    Args:
        dy: Like y.
        y: As forward returned it.
        bits: As forward returned them; None if they are in y.
        fit: That of the activation.

    Returns:
        dx, like y.
    """
    return _backward_op(dy, y, bits, fit.minimum, fit.cut, fit.left, fit.right)
