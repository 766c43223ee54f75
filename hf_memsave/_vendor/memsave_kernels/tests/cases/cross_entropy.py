"""Cross-entropy in place, and of a linear in chunks."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import memsave_kernels as ours

from .case import Case, Make, gradients, leaves


def _labels(make: Make, rows: int, columns: int) -> Tensor:
    labels = (make(rows, dtype=torch.float32).abs() * 1000).long() % columns
    labels[1:2] = -100
    return labels


def _inputs(make: Make, rows: int, columns: int) -> tuple[Any, ...]:
    return make(rows, columns, scale=4.0), _labels(make, rows, columns)


def _ours(logits: Tensor, labels: Tensor, by: float) -> tuple[Tensor, ...]:
    (leaf,) = leaves(logits)
    loss = ours.cross_entropy_(leaf.clone(), labels)
    return loss, *gradients(by * loss, (leaf,), torch.ones(()))


def _eager(wide: torch.dtype, logits: Tensor, labels: Tensor, by: float) -> tuple[Tensor, ...]:
    (leaf,) = leaves(logits)
    loss = F.cross_entropy(leaf.to(wide), labels)
    return loss, *gradients(by * loss, (leaf,), torch.ones(()))


def _linear(make: Make, rows: int, columns: int) -> tuple[Any, ...]:
    return make(rows, 16), make(columns, 16), make(columns), _labels(make, rows, columns)


def _ours_linear(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    wanted = x, weight, bias = leaves(x, weight, bias)
    loss = ours.linear_cross_entropy(x, weight, labels, bias, rows=2)
    return loss, *gradients(loss, wanted, torch.ones(()))


def _eager_linear(wide: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    wanted = x, weight, bias = leaves(x, weight, bias)
    loss = F.cross_entropy(F.linear(x, weight, bias).to(wide), labels)
    return loss, *gradients(loss, wanted, torch.ones(()))


#: The second reading is the price of rows that no program can hold.
BYTES = {"cross_entropy_kernel": 6, "scale_kernel": 4}
CASES = (
    Case("cross-entropy", _inputs, partial(_ours, by=3.0), partial(_eager, by=3.0), BYTES),
    Case("cross-entropy, gradient 1", _inputs, partial(_ours, by=1.0), partial(_eager, by=1.0),
         {"cross_entropy_kernel": 6, "scale_kernel": 0}),
    Case("linear and cross-entropy", _linear, _ours_linear, _eager_linear, {}, roundings=3),
)  # fmt: skip
