"""The input and the end of a LoRA adapter."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import memsave_kernels as ours

from .case import Case, Make, gradients, leaves
from .dropout_norm import SEED, P, mask_of


def _inputs(make: Make, rows: int, columns: int, wide: bool) -> tuple[Any, ...]:
    dtype = torch.float32 if wide else make(1).dtype
    return make(rows, columns), make(rows, columns, dtype=dtype), make(rows, columns)


def _ours(x: Tensor, dy: Tensor, add: Tensor, p: float) -> tuple[Tensor, ...]:
    (x,) = leaves(x)
    y = ours.lora_input(x, p, SEED, dy.dtype)
    assert torch.equal(y, ours.lora_input_forward(x.detach(), p, SEED, dy.dtype))
    return y, *gradients(y, (x,), dy), ours.lora_input_backward(dy, p, SEED, x.dtype, add)


def _eager(wide: torch.dtype, x: Tensor, dy: Tensor, add: Tensor, p: float) -> tuple[Tensor, ...]:
    (x,) = leaves(x)
    y = x.to(dy.dtype) * mask_of(x, p).to(dy.dtype)
    (dx,) = gradients(y, (x,), dy)
    return y, dx, add + dx


def _end(make: Make, rows: int, columns: int, wide: bool) -> tuple[Any, ...]:
    dtype = torch.float32 if wide else make(1).dtype
    return make(rows, columns), make(rows, columns, dtype=dtype), make(rows, columns)


def _ours_end(base: Tensor, b: Tensor, dz: Tensor) -> tuple[Tensor, ...]:
    base, b = leaves(base, b)
    z = ours.lora_output(base, b, 0.3)
    return z, *gradients(z, (base, b), dz)


def _eager_end(wide: torch.dtype, base: Tensor, b: Tensor, dz: Tensor) -> tuple[Tensor, ...]:
    base, b = leaves(base, b)
    z = (base + b * 0.3).to(base.dtype)
    return z, *gradients(z, (base, b), dz)


HALVES = (torch.bfloat16, torch.float16)
INPUT, OUTPUT = {"lora_input_kernel": 6}, {"lora_output_kernel": 6}
CASES = (
    Case("LoRA input", partial(_inputs, wide=False), partial(_ours, p=P), partial(_eager, p=P), INPUT),
    Case("LoRA input, float32 A", partial(_inputs, wide=True), partial(_ours, p=P), partial(_eager, p=P), {}, HALVES),
    Case("LoRA input, cast", partial(_inputs, wide=True), partial(_ours, p=0.0), partial(_eager, p=0.0), {}, HALVES),
    Case("LoRA output", partial(_end, wide=False), _ours_end, _eager_end, OUTPUT),
    Case("LoRA output, float32 B", partial(_end, wide=True), _ours_end, _eager_end, {}, HALVES),
)
