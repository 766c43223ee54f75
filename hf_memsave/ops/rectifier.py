r"""``rectifier``: ReLU, ReLU6, LeakyReLU, Hardtanh and Threshold, whose slope is one of two numbers.

Forward and, for an incoming gradient dy, backward::

    y = f(x)
    dx = dy f'(x)       f' has one value where x lies inside (above a bound, or between two), another one outside

Kept for backward::

    eager                                 y (ReLU) or x (the others), and y in the next convolution
    here    x is promised (by a norm)     nothing                           (y is promised)
            y (or x) is kept by another   that, shared as in stock
            else                          one bit an element, see :mod:`~hf_memsave.tape.masks`

Exact, also in place: stock's own operation and backward. Source: Bhatia & Dangel (2024), 2.2.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from hf_memsave.ops.op import Binding, KeptBytes, Op
from hf_memsave.tape import coded, current, promise
from hf_memsave.tape.masks import Mask, saves_bytes
from hf_memsave.tape.promise import Keep, find
from hf_memsave.tape.storage import Code


def kept_bytes(shape: tuple[int, ...], itemsize: int, alone: bool = True) -> KeptBytes:
    """``alone``: nobody else keeps the tensor that stock's backward reads."""
    n = torch.Size(shape).numel()
    return KeptBytes(n * itemsize, -(-n // 8) if alone else n * itemsize)


def _rectifier(module: nn.Module, binding: Binding, input: Tensor) -> Tensor:
    stock, tape = partial(binding.stock.forward, module), current()
    given = None if tape is None else find(input, tape)
    if tape is None or module.inplace or given is None or isinstance(given, Code):  # a code loses signs
        is_alive = input.is_leaf and not isinstance(module, nn.ReLU)  # which keeps its output
        with coded(lambda tensor, keep: None if is_alive else _mask(module, tensor, keep)):
            return stock(input)
    with coded(lambda tensor, keep: tape.pack(input)):  # x lies inside where y does
        y = stock(input)
    return promise(y, stock, input)


@torch.no_grad()
def _mask(module: nn.Module, tensor: Tensor, keep: Keep) -> Mask | None:
    """A mask of where stock's own backward gives a one, for the numbers it would read."""
    if not saves_bytes(tensor):
        return None
    ones = tensor.new_ones(()).expand(tensor.shape)
    if isinstance(module, nn.Hardtanh):
        inside = torch.ops.aten.hardtanh_backward(ones, tensor, module.min_val, module.max_val)
        return Mask(tensor, inside != 0, ((module.min_val + module.max_val) / 2, math.inf), keep)
    if isinstance(module, nn.LeakyReLU):
        inside = torch.ops.aten.leaky_relu_backward(ones, tensor, 0.0, False)
    else:
        inside = torch.ops.aten.threshold_backward(ones, tensor, getattr(module, "threshold", 0.0))
    return Mask(tensor, inside != 0, (math.inf, -math.inf), keep)


def _check(module: nn.Module, names: Mapping[str, str]) -> str | None:
    is_bounded = not isinstance(module, nn.Hardtanh) or math.isfinite(module.min_val + module.max_val)
    return None if is_bounded else "one of its bounds is infinite: expected two numbers"


RECTIFIER = Op("rectifier", "frozen", _rectifier, _check)
