r"""``new_gelu``: GELU by tanh, as the Python expression of GPT-2, Phi and T5 v1.1.

Forward::

    t = tanh(√(2/π) (x + 0.044715 x³))
    y = 0.5 x (1 + t)

Kept for backward, each in x's dtype::

    eager    x, t, 0.5 x, 1 + t, and y in the next linear
    here     x                                         (all others are promised)

Exact: stock's own operations run under autograd in stock's order; only what they keep is promised.
Source: Hendrycks and Gimpel (2016), arXiv:1606.08415.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from hf_memsave.ops.cast import autocast_fp32
from hf_memsave.ops.op import Binding, KeptBytes, Op
from hf_memsave.tape import Tape, current, promised


def new_gelu_reference(x: Tensor) -> Tensor:
    """The expression of ``NewGELUActivation`` in ``transformers``; the tests' ground truth."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def kept_bytes(shape: tuple[int, ...], itemsize: int) -> KeptBytes:
    """The activation of ``shape`` and the linear after it."""
    n = torch.Size(shape).numel() * itemsize
    return KeptBytes(5 * n, n)


def new_gelu(x: Tensor) -> Tensor:
    """Keeps ``x`` alone."""
    # In the order in which Python evaluates stock's expression: autograd adds up x's gradients by it.
    half = promised(_half, x)
    t = _Tanh.apply(_inner(x, autocast_fp32(x)), x.detach(), current())
    return promised(torch.mul, half, promised(_one_plus, t))


def _inner(x: Tensor, wide: Tensor) -> Tensor:
    return math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(wide, 3.0))


def _half(x: Tensor) -> Tensor:
    return 0.5 * x


def _one_plus(t: Tensor) -> Tensor:
    return 1.0 + t


def _tanh_of_inner(x: Tensor) -> Tensor:
    return torch.tanh(_inner(x, x))


class _Tanh(torch.autograd.Function):
    """``torch.tanh``, whose output is promised before autograd keeps it."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, x: Tensor, tape: Tape | None) -> Tensor:
        t = torch.tanh(z)
        if tape is not None:
            tape.promise(t, _tanh_of_inner, (x,))
        ctx.save_for_backward(t)
        return t

    @staticmethod
    def backward(ctx: Any, dt: Tensor) -> tuple[Tensor, None, None]:
        (t,) = ctx.saved_tensors
        return torch.ops.aten.tanh_backward(dt, t), None, None


def _new_gelu(module: nn.Module, binding: Binding, input: Tensor) -> Tensor:
    return new_gelu(input)


_EXPRESSION = """
def forward(self, x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
"""

NEW_GELU = Op("new_gelu", "activation", _new_gelu, expressions=(_EXPRESSION,))
