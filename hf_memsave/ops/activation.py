r"""``activation``: an elementwise function whose own backward keeps only its input (GELU, tanh-GELU, SiLU).

Forward and, for an incoming gradient dy, backward::

    y = f(x)
    dx = dy f'(x)

Kept for backward, each in x's dtype::

    eager    x, and y in the next linear or product
    here     x                                         (y is promised)

Exact: PyTorch's own op and its own backward. ReLU has no op of its own: stock keeps its output and nothing else, the
linear after it keeps that same tensor, and a dropout between them is promised from it. That is the floor.
"""

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_memsave.ops.op import Binding, KeptBytes, Op
from hf_memsave.tape import promise


def kept_bytes(shape: tuple[int, ...], itemsize: int) -> KeptBytes:
    """The activation of ``shape`` and the linear after it."""
    n = torch.Size(shape).numel() * itemsize
    return KeptBytes(2 * n, n)


def _activation(module: nn.Module, binding: Binding, input: Tensor) -> Tensor:
    stock = partial(binding.stock.forward, module)
    return promise(stock(input), stock, input)


def _check(module: nn.Module, names: Mapping[str, str]) -> str | None:
    if getattr(module, "inplace", False):
        return "it works in place (inplace=True), so its input is gone"
    act = getattr(module, "act", F.gelu)
    if act is F.gelu or (isinstance(act, partial) and act.func is F.gelu):
        return None
    return f"expected torch's own gelu, got {getattr(act, '__qualname__', act)}, whose intermediates are kept"


ACTIVATION = Op("activation", "activation", _activation, _check)
