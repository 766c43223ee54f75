"""Dropout, residual and LayerNorm, together and the norm alone."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import memsave_kernels as ours

from .case import Case, Make, leaves

P, SEED = 0.3, 2**62 + 12345


def mask_of(like: Tensor, p: float = P) -> Tensor:
    """What the kernels multiply by, in float32."""
    ones = torch.ones_like(like, dtype=torch.float32)
    return ours.lora_input_forward(ones, p, SEED) if p else ones


def _inputs(make: Make, rows: int, columns: int, wide: bool, residual: bool, bias: bool) -> tuple[Any, ...]:
    x, dtype = make(rows, columns), torch.float32 if wide else make(1).dtype
    other = make(rows, columns, dtype=dtype) + 0.5 if residual else None
    vectors = make(columns, dtype=dtype) + 1, make(columns, dtype=dtype) if bias else None
    return x, other, *vectors, make(rows, columns), make(rows, columns, dtype=dtype)


def _ours(x: Any, residual: Any, w: Any, b: Any, dlow: Any, dh: Any, p: float, wide: bool) -> tuple[Tensor, ...]:
    wanted = leaves(*(t for t in (x, residual, w, b) if t is not None))
    rest = iter(wanted)
    args: list[Any] = [None if t is None else next(rest) for t in (x, residual, w, b)]
    low = x.dtype if wide else None
    out = torch.float32 if wide else None
    h, y, y_low = ours.dropout_norm(args[0], args[1], args[2], args[3], 1e-5, p, SEED, out, low)
    outputs = [t for t in (h if h is not args[0] else None, y, y_low) if t is not None]
    weights = [t for t in (dh if h is not args[0] else None, dh.to(y.dtype), dlow if wide else None) if t is not None]
    grads = torch.autograd.grad(outputs, wanted, weights)
    again = ours.layer_norm_again(h.detach(), w, b, *ours.dropout_norm_forward(x, residual, w, b, 1e-5, p, SEED)[3:],
                                  y.dtype)  # fmt: skip
    assert torch.equal(again, y)
    _check_again(h, y, y_low, w, b, p, x, residual)
    return *outputs, *grads


def _check_again(h: Tensor, y: Tensor, y_low: Any, w: Tensor, b: Any, p: float, x: Tensor, residual: Any) -> None:
    mean, rstd = ours.dropout_norm_forward(h.detach(), None, w, b)[3:]
    found = ours.dropout_norm_backward(
        y.detach(), h.detach(), w, b, mean, rstd, p, SEED, x.dtype, getattr(residual, "dtype", None), has_dw=False,
        out=y.dtype, low=getattr(y_low, "dtype", None),
    )  # fmt: skip
    assert found.weight is None and found.bias is None and torch.equal(found.y, y)
    assert y_low is None or torch.equal(found.low, y_low)


def _sum(x: Any, residual: Any, p: float) -> tuple[Tensor, ...]:
    return (ours.dropout_sum(x, residual, p, SEED),)


def _eager_sum(kind: torch.dtype, x: Any, residual: Any, p: float) -> tuple[Tensor, ...]:
    return (x * mask_of(x, p).to(x.dtype) + residual,)


def _eager(
    kind: torch.dtype, x: Any, residual: Any, w: Any, b: Any, dlow: Any, dh: Any, p: float, wide: bool
) -> tuple[Tensor, ...]:
    wanted = leaves(*(t for t in (x, residual, w, b) if t is not None))
    rest: Iterator[Any] = iter(wanted)
    first, other, weight, bias = (None if t is None else next(rest) for t in (x, residual, w, b))
    h: Any = first * mask_of(x, p).to(x.dtype) if p else first
    h = h if other is None else h + other
    y = F.layer_norm(h.float() if wide and kind == torch.float32 else h, w.shape, weight, bias, 1e-5)
    low = y.to(x.dtype) if wide else None
    outputs = [t for t in (h if h is not first else None, y, low) if t is not None]
    weights = [t for t in (dh if h is not first else None, dh.to(y.dtype), dlow if wide else None) if t is not None]
    return *outputs, *torch.autograd.grad(outputs, wanted, weights)


def _case(name: str, bytes_: dict[str, float], p: float, wide: bool, residual: bool, bias: bool) -> Case:
    dtypes = (torch.bfloat16, torch.float16) if wide else (torch.float32, torch.bfloat16, torch.float16)
    inputs = partial(_inputs, wide=wide, residual=residual, bias=bias)
    return Case(name, inputs, partial(_ours, p=p, wide=wide), partial(_eager, p=p, wide=wide), bytes_, dtypes)


def _bytes(forward: float, backward: float) -> dict[str, float]:
    return {"dropout_norm_forward_kernel": forward, "dropout_norm_backward_kernel": backward}


CASES = (
    _case("dropout, residual, LayerNorm", _bytes(8, 10), P, False, True, True),
    _case("the same under autocast", {}, P, True, True, True),
    _case("residual, LayerNorm without bias", {}, 0.0, False, True, False),
    Case(
        "sum alone",
        lambda make, rows, columns: (make(rows, columns), make(rows, columns)),
        partial(_sum, p=P),
        partial(_eager_sum, p=P),
        {"dropout_sum_kernel": 6},
    ),
    _case("LayerNorm", _bytes(4, 8), 0.0, False, False, True),
)
