"""Softmax and dropout of attention's scores, with a mask that heads share."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import memsave_kernels as ours

from .case import Case, Make, gradients, leaves
from .dropout_norm import SEED, P

SCALE = 0.125


def _inputs(make: Make, rows: int, columns: int) -> tuple[Any, ...]:
    mask = torch.zeros(2, 1, rows, columns)
    mask[1, 0, :, columns // 2 :] = torch.finfo(torch.float16).min
    x = make(2, 2, rows, columns, scale=8.0)
    return x, mask.to(x), make(2, 2, rows, columns)


def _ours(x: Tensor, mask: Tensor, dd: Tensor, p: float) -> tuple[Tensor, ...]:
    (x,) = leaves(x)
    d = ours.softmax_dropout(x, mask, SCALE, p, SEED)
    weights, same = ours.softmax_dropout_forward(x.detach(), mask, SCALE, p, SEED)
    (dx,) = gradients(d, (x,), dd)
    dx_same, again = ours.softmax_dropout_backward(dd, weights, SCALE, p, SEED, x.dtype, again=True)
    assert torch.equal(d, same) and torch.equal(d, again) and torch.equal(dx, dx_same)
    return weights, d, dx


def _eager(wide: torch.dtype, x: Tensor, mask: Tensor, dd: Tensor, p: float) -> tuple[Tensor, ...]:
    (x,) = leaves(x)
    weights = torch.softmax(x * SCALE + mask, -1, dtype=wide).to(x.dtype)
    d = weights
    if p:
        keep = ours.lora_input_forward(torch.ones(x.numel() // x.shape[-1], x.shape[-1], device=x.device), p, SEED)
        d = weights * keep.view(x.shape).to(x.dtype)
    return weights, d, *gradients(d, (x,), dd)


# dx is rounded after each of its three factors, PyTorch's after two.
#: Four heads and batches of 6 bytes an element, and a mask for two of them, 2 each for both that share it.
BYTES = {"softmax_dropout_forward_kernel": 4 * (6 + 2), "softmax_dropout_backward_kernel": 4 * 8}
CASES = (
    Case("softmax, dropout", _inputs, partial(_ours, p=P), partial(_eager, p=P), BYTES, roundings=2),
    Case("softmax", _inputs, partial(_ours, p=0.0), partial(_eager, p=0.0), {}),
)
