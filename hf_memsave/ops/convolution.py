r"""``convolution``: ``nn.Conv1d`` to ``3d``, ``nn.ConvTranspose1d`` to ``3d``: they keep what wanted gradients need.

Forward and, for an incoming gradient dy, backward (``*`` is linear in both of its factors)::

    y  = W * x + b
    dx = Wᵀ * dy        reads W
    dW = dy ⋆ x         reads x
    db = Σ dy

Kept for backward, beside W::

    eager                              x, also where W is frozen
                                       x and the padded x (padding_mode "reflect" and "replicate")
    here       W wants no gradient     nothing
               W wants a gradient      x, once: padded where the layer pads

Under autocast eager also keeps low-precision copies of W and of x. Here both casts are explicit and promised; stock's
own where the convolution is transposed, or padded with anything but zeros.

Exact: stock's own operation and backward, see :mod:`~hf_memsave.tape.coding`. Source: Bhatia & Dangel (2024), 2.2.1.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_memsave.ops.cast import autocast_low, is_autocast
from hf_memsave.ops.op import Binding, KeptBytes, Op
from hf_memsave.tape import Blank, coded
from hf_memsave.tape.promise import Keep


def kept_bytes(shape: tuple[int, ...], itemsize: int, frozen: bool, padded: tuple[int, ...] | None = None) -> KeptBytes:
    """For an input of ``shape`` that wants a gradient, and of ``padded`` after reflecting or replicating its border."""
    n, inner = (torch.Size(s or shape).numel() * itemsize for s in (shape, padded))
    eager = n if padded is None else n + inner
    return KeptBytes(eager, 0 if frozen else inner)


def _convolution(module: nn.Module, binding: Binding, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    weight, x = module.weight, input
    is_cast = is_autocast(x) and not module.transposed and module.padding_mode == "zeros"  # stock pads before it casts
    if is_cast:
        weight, x = autocast_low(weight), autocast_low(x)
    pads = module.padding_mode in ("reflect", "replicate")
    with coded(partial(_code, weight=weight, padded=x if pads else None)):
        if is_cast:
            return module._conv_forward(x, weight, module.bias)
        return binding.stock.forward(module, x, *args, **kwargs)


def _code(tensor: Tensor, keep: Keep, weight: Tensor, padded: Tensor | None) -> Blank | None:
    if tensor.shape == weight.shape:  # the weight, perhaps cast (or an input of its shape, which is kept as in stock)
        return None
    before_padding = padded is not None and tensor.untyped_storage()._cdata == padded.untyped_storage()._cdata
    return None if weight.requires_grad and not before_padding else Blank(tensor)


CONVOLUTION = Op("convolution", "frozen", _convolution)
