r"""``quick_gelu``: GELU by a logistic function, as the Python expression of CLIP.

Forward (σ is the logistic function)::

    s = σ(1.702 x)
    y = x s

Kept for backward, each in x's dtype::

    eager    x, s, and y in the next linear
    here     x                                         (the others are promised)

Exact: stock's own operations run under autograd in stock's order; only what they keep is promised.
Source: Hendrycks and Gimpel (2016), arXiv:1606.08415.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_memsave.ops.op import Binding, KeptBytes, Op
from hf_memsave.tape import coded, current, promised


def quick_gelu_reference(x: Tensor) -> Tensor:
    """The expression of ``QuickGELUActivation`` in ``transformers``; the tests' ground truth."""
    return x * torch.sigmoid(1.702 * x)


def kept_bytes(shape: tuple[int, ...], itemsize: int) -> KeptBytes:
    """The activation of ``shape`` and the linear after it."""
    n = torch.Size(shape).numel() * itemsize
    return KeptBytes(3 * n, n)


def quick_gelu(x: Tensor) -> Tensor:
    """Keeps ``x`` alone."""
    if (tape := current()) is None:
        return quick_gelu_reference(x)
    # Sigmoid keeps its output: promised as it is about to be kept, it keeps the promise instead.
    with coded(lambda s, keep: tape.promise(s, _gate, (x,))):
        s = _gate(x)
    return promised(torch.mul, x, s)


def _gate(x: Tensor) -> Tensor:
    return torch.sigmoid(1.702 * x)


def _quick_gelu(module: nn.Module, binding: Binding, input: Tensor) -> Tensor:
    return quick_gelu(input)


_EXPRESSION = """
def forward(self, x):
    return x * torch.sigmoid(1.702 * x)
"""

QUICK_GELU = Op("quick_gelu", "activation", _quick_gelu, expressions=(_EXPRESSION,))
