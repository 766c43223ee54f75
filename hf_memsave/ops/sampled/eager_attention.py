r"""``eager_attention``: the model's own eager attention, its products sampled (``WTACRS(attention=True)``).

Forward, with s the scale, M the masks and biases and D dropout::

    P = softmax(Q Kᵀ s + M)         O = D(P) V

Both products are :mod:`~hf_memsave.ops.sampled.wta_matmul`: the module's own forward runs, and a function mode hands
the products that it calls to the op. The config goes on saying "eager", so masks and returned weights are stock's.

Source: Liu et al. (2023), arXiv:2305.15265, Figure 5.
"""

from __future__ import annotations

import contextlib
import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_memsave.ops.op import Op, autocast_low
from hf_memsave.ops.sampled.sampler import Layer
from hf_memsave.ops.sampled.wta_crs import LAYER
from hf_memsave.ops.sampled.wta_matmul import wta_matmul
from hf_memsave.tape import current
from hf_memsave.tape.as_stock import run_counted
from hf_memsave.tape.private import FakeTensor, innermost_hooks

#: The implementation that this op is for.
NAME = "eager"
_PRODUCTS = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__})


def is_attention(cls: type[nn.Module]) -> bool:
    """Return whether modules of the stock class ``cls`` choose attention by its name, with eager as the default."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return code is not None and "eager_attention_forward" in code.co_names


def implementation(module: nn.Module) -> str | None:
    """Return the attention that the config of ``module`` names; None if it has no config, or one that names none."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


class _Sampling(TorchFunctionMode):
    """A mode that samples products of heads, tensors of four dimensions or more, under the name of ``layer``."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer, self.products = layer, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        are_heads = func in _PRODUCTS and all(type(a) in (Tensor, FakeTensor) and a.dim() >= 4 for a in args)
        # A checkpoint of the user's own may run this again, when no batch runs: then a foreign hook is innermost.
        if not are_heads or kwargs or (current() is None and innermost_hooks() is not None):
            return func(*args, **(kwargs or {}))
        self.products += 1
        a, b = map(autocast_low, args)
        run = partial(wta_matmul, a, b, self.layer, f"product {self.products}")
        return run_counted(current(), "matmul", run, torch.matmul, (a, b))


def _eager_attention(module: nn.Module, patch: Any, *args: Any, **kwargs: Any) -> Any:
    layer = module.__dict__.get(LAYER) if module.training else None
    with contextlib.nullcontext() if layer is None else _Sampling(layer):
        return patch.stock.forward(module, *args, **kwargs)


EAGER_ATTENTION = Op("eager_attention", _eager_attention, is_implied=True)
