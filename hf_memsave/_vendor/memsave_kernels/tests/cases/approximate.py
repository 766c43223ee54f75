"""Inverted activations, in bits of their own and in the output's; few-bit; bits; rows."""

from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

import memsave_kernels as ours

from .case import Case, Make
from .gated import TORCH

#: Of SiLU.
FIT = ours.InverseFit(
    -1.278464542761074, (-0.27846455574035645, 1.297928264865078e-08), 10.55032217,
    (2.394556781, -4.31483448, 22.2654029, -120.973515, 393.3080566, -648.6723617, 423.3816919),
    (0.6501873957, 1.023051935, -1.218458003, 1.110078241, -1.22650148, 0.8419566747, -0.3100325074, 0.05965577741,
     -0.005284790228, 0.000131052535),
)  # fmt: skip
BOUNDARIES = torch.linspace(-3, 3, 15)
LEVELS = torch.linspace(-0.1, 1.1, 16).repeat(2)


def _inputs(make: Make, rows: int, columns: int) -> tuple[Any, ...]:
    return make(rows, columns, scale=3.0), make(rows, columns)


def slope_of(y: Tensor, left: Tensor, ulp: float) -> Tensor:
    """As hf_memsave computes it in PyTorch."""
    high, rest = FIT.minimum
    s = ((y - high) - rest).clamp(ulp / 10, FIT.cut - high).sqrt()
    first, second = (reduce(lambda total, c: total * s + c, reversed(side)) for side in (FIT.left, FIT.right))
    return (s * torch.where(left, y * first, second)).masked_fill(~left & (y > FIT.cut), 1.0)


def is_left(x: Tensor) -> Tensor:
    """Whether x is left of SiLU's minimum; PyTorch rounds a number to x's dtype before it compares."""
    return x.float() < FIT.turn


def _ours(x: Tensor, dy: Tensor, in_y: bool) -> tuple[Tensor, ...]:
    y, bits = ours.inverted_forward(x, "silu", FIT.turn, in_y)
    assert in_y or torch.equal(ours.unpack_bits(bits, x.numel()).view(x.shape), is_left(x))
    return y, ours.inverted_backward(dy, stored(x, in_y), bits, FIT)  # near T the rounding of y decides


def stored(x: Tensor, in_y: bool) -> Tensor:
    """PyTorch's y, as it is kept."""
    y = TORCH["silu"](x.contiguous())  # whose bits depend on strides
    word = y.view(torch.int32 if y.itemsize == 4 else torch.int16)
    return ((word & ~1) | is_left(x).to(word.dtype)).view(y.dtype) if in_y else y


def _eager(wide: torch.dtype, x: Tensor, dy: Tensor, in_y: bool) -> tuple[Tensor, ...]:
    y, left = TORCH["silu"](x), is_left(x)
    ulp = torch.finfo(y.dtype).eps / 4
    middle = y.to(wide)
    if in_y and wide == torch.float32:
        y = stored(x, in_y)
        word = y.view(torch.int32 if y.itemsize == 4 else torch.int16)
        middle = ((word & ~1).view(y.dtype).float() + (word | 1).view(y.dtype).float()) / 2
    return y, (dy * slope_of(middle, left, 2 * ulp if in_y else ulp)).to(y.dtype)


def _ours_few(x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    y, codes = ours.few_bit_forward(x, BOUNDARIES.to(x.device), "gelu")
    assert torch.equal(ours.few_bit_codes(x, BOUNDARIES.to(x.device)), codes)
    return y, ours.few_bit_backward(dy, codes, LEVELS.to(x.device))


def _eager_few(wide: torch.dtype, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    codes = torch.bucketize(x.float(), BOUNDARIES.to(x.device), right=True)
    return TORCH["gelu"](x), (dy * LEVELS.to(x.device)[codes]).to(x.dtype)


def _drawn(make: Make, rows: int, columns: int) -> tuple[Any, ...]:
    index = torch.arange(rows, device=make(0).device).flip(0)
    return make(rows, columns), index, make(rows, dtype=torch.float32)


def _ours_rows(x: Tensor, index: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return ours.gather_rows(x, index.int(), scale), ours.gather_rows(x, index), ours.row_norms(x)


def _eager_rows(wide: torch.dtype, x: Tensor, index: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return (x[index] * scale[:, None]).to(x.dtype), x[index], torch.linalg.vector_norm(x, dim=-1, dtype=wide)


def _flags(make: Make, rows: int, columns: int) -> tuple[Any, ...]:
    return (make(rows, columns) > 0,)


def _ours_flags(flags: Tensor) -> tuple[Tensor, ...]:
    bits = ours.pack_bits(flags)
    return bits, ours.unpack_bits(bits, flags.numel())


def _eager_flags(wide: torch.dtype, flags: Tensor) -> tuple[Tensor, ...]:
    flat = torch.nn.functional.pad(flags.flatten().long(), (0, -flags.numel() % 8)).view(-1, 8)
    return (flat << torch.arange(8, device=flat.device)).sum(1).to(torch.uint8), flags.flatten()


INVERTED = {"inverted_forward_kernel": 4, "inverted_backward_kernel": 6}
FEW = {"few_bit_forward_kernel": 4, "few_bit_backward_kernel": 4}
CASES = (
    Case(
        "inverted silu",
        _inputs,
        partial(_ours, in_y=False),
        partial(_eager, in_y=False),
        INVERTED | {"unpack_bits_kernel": 1},
    ),
    Case("precision bit silu", _inputs, partial(_ours, in_y=True), partial(_eager, in_y=True), INVERTED),
    Case("few-bit gelu", _inputs, _ours_few, _eager_few, FEW),
    Case("rows", _drawn, _ours_rows, _eager_rows, {"gather_rows_kernel": 4, "row_norms_kernel": 2}),
    Case("bits", _flags, _ours_flags, _eager_flags, {"pack_bits_kernel": 1, "unpack_bits_kernel": 1}, (torch.float32,)),
)
