r"""An activation that keeps a few bits of its derivative.

With boundaries of 2^b pieces, and l_c a slope for each::

    y = f(x)            c = how many boundaries are at most x
    dx = dy l_c

Codes are kept plane by plane: a bit of each of eight elements in a byte. Behind them is a byte for each group of 1024
elements: whether one is not finite. Then the last code is of all that are not, whose slope is NaN, and the last two
pieces share the code before. Bytes an element in half precision: forward 4 + b/8, codes alone 2 + b/8, backward
4 + b/8.
Source: Novikov et al. (2023), arXiv:2202.00441.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._activations import ACTIVATIONS, activation, check
from ._define import define
from ._launch import ceil_div, dense, launch, like
from .bits import BLOCK, store_packed, unpacked


@triton.jit
def few_bit_forward_kernel(
    x_ptr, boundaries_ptr, y_ptr, codes_ptr, n, plane, ACT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """The output y unless its pointer is None, and the codes, by a binary search; planes are ``plane`` bytes apart."""
    last: tl.constexpr = (1 << BITS) - 1
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    if y_ptr is not None:
        tl.store(y_ptr + at, activation(x, ACT), mask=at < n)
    code = tl.zeros([BLOCK], dtype=tl.int32)
    for i in tl.static_range(BITS):
        higher = code + (1 << (BITS - 1 - i))
        code = tl.where(x >= tl.load(boundaries_ptr + higher - 1), higher, code)
    is_finite = tl.abs(x) < float("inf")
    has_odd = tl.max(tl.where(is_finite, 0, 1), axis=0)
    tl.store(codes_ptr + tl.cast(plane, tl.int64) * BITS + tl.program_id(0), has_odd.to(tl.uint8))
    code = tl.where(is_finite, tl.minimum(code, last - has_odd), last)
    code = tl.where(at < n, code, 0)
    for i in tl.static_range(BITS):
        store_packed(codes_ptr + tl.cast(plane, tl.int64) * i, (code >> i) & 1, plane, BLOCK)


@triton.jit
def few_bit_backward_kernel(dy_ptr, codes_ptr, levels_ptr, dx_ptr, n, plane, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient dx."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    has_odd = tl.load(codes_ptr + tl.cast(plane, tl.int64) * BITS + tl.program_id(0)).to(tl.int32)
    code = tl.zeros([BLOCK], dtype=tl.int32) + (has_odd << BITS)
    for i in tl.static_range(BITS):
        code |= unpacked(codes_ptr + tl.cast(plane, tl.int64) * i, plane, BLOCK) << i
    dy = tl.load(dy_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(dx_ptr + at, dy * tl.load(levels_ptr + code), mask=at < n)


def _forward(x: Tensor, boundaries: Tensor, act: str) -> tuple[Tensor, Tensor]:
    y, codes = _forward_fake(x, boundaries, act)
    _launch_forward(x, boundaries, act, y, codes)
    return y, codes


def _launch_forward(x: Tensor, boundaries: Tensor, act: str, y: Tensor | None, codes: Tensor) -> None:
    args = (*dense(x, boundaries), y, codes, x.numel(), ceil_div(x.numel(), 8))
    constants = {"ACT": act, "BITS": boundaries.shape[0].bit_length(), "BLOCK": BLOCK}
    launch(few_bit_forward_kernel, (ceil_div(x.numel(), BLOCK),), args, constants)


def _forward_fake(x: Tensor, boundaries: Tensor, act: str) -> tuple[Tensor, Tensor]:
    return like(x), _codes_fake(x, boundaries)


def _codes(x: Tensor, boundaries: Tensor) -> Tensor:
    codes = _codes_fake(x, boundaries)
    _launch_forward(x, boundaries, ACTIVATIONS[0], None, codes)
    return codes


def _codes_fake(x: Tensor, boundaries: Tensor) -> Tensor:
    planes = boundaries.shape[0].bit_length() * ceil_div(x.numel(), 8)
    return x.new_empty(planes + ceil_div(x.numel(), BLOCK), dtype=torch.uint8)


def _backward(dy: Tensor, codes: Tensor, levels: Tensor) -> Tensor:
    dx = _backward_fake(dy, codes, levels)
    args = (*dense(dy, codes, levels), dx, dy.numel(), ceil_div(dy.numel(), 8))
    constants = {"BITS": levels.shape[0].bit_length() - 2, "BLOCK": BLOCK}
    launch(few_bit_backward_kernel, (ceil_div(dy.numel(), BLOCK),), args, constants)
    return dx


def _backward_fake(dy: Tensor, codes: Tensor, levels: Tensor) -> Tensor:
    return like(dy)


_forward_op = define(
    "few_bit_forward(Tensor x, Tensor boundaries, str act) -> (Tensor, Tensor)", _forward, _forward_fake
)
_codes_op = define("few_bit_codes(Tensor x, Tensor boundaries) -> Tensor", _codes, _codes_fake)
_backward_op = define("few_bit_backward(Tensor dy, Tensor codes, Tensor levels) -> Tensor", _backward, _backward_fake)


def few_bit_forward(x: Tensor, boundaries: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """An activation, and in which piece each element lies.

    Args:
        x: Any shape, float32, bfloat16 or float16.
        boundaries: ``[2^b - 1]``, float32, rising, on x's device; b is 1 to 8.
        act: One of ``ACTIVATIONS``.

    Returns:
        y, like x, and uint8 ``[b ceil(n / 8) + ceil(n / 1024)]``.
    """
    return _forward_op(x, boundaries, check(act))


def few_bit_codes(x: Tensor, boundaries: Tensor) -> Tensor:
    """Only in which piece each element lies; arguments and codes as of :func:`few_bit_forward`."""
    return _codes_op(x, boundaries)


def few_bit_backward(dy: Tensor, codes: Tensor, levels: Tensor) -> Tensor:
    """The gradient of :func:`few_bit_forward`, like dy.

    Args:
        dy: Like x.
        codes: As forward returned them.
        levels: float32 ``[2^(b + 1)]``: of each code; and of each in a group where one is not finite.

    Returns:
        dx.
    """
    return _backward_op(dy, codes, levels)
