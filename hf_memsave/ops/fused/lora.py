r"""``fused_lora``: the operations around the two products of PEFT's LoRA adapter, as one kernel before and one after.

Forward, with x in A's dtype, and backward for an incoming gradient dz::

    y = dropout(x)    b = B(A(y))    z = base + s b                one kernel for y, one for z
    dbase = dz        db = s dz      dx = dropout(dy)              one kernel each, the same mask

Kept for backward, beside what the frozen layer keeps::

    stock    x in A's dtype, a byte an element of the mask, y in A's dtype
    here     nothing: y is drawn again from x and a seed

**The masks are not stock's**, but of the same distribution. Source: Hu et al. (2022), arXiv:2106.09685.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_memsave.ops.fused.kernels import can_run, draws_as_stock, fused, kernels, seed_for
from hf_memsave.ops.lora import check, plain_adapter
from hf_memsave.ops.op import Op


def _lora(module: Any, patch: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    found = None if args or kwargs or not isinstance(x, Tensor) else plain_adapter(module)
    if found is None or not can_run(x, found[1].weight):
        return patch.stock.forward(module, x, *args, **kwargs)
    dropout, of_a, of_b, scale = found
    p = dropout.p if type(dropout) is nn.Dropout and dropout.training else 0.0
    if p == 1 or (p and draws_as_stock(x, patch)):
        return patch.stock.forward(module, x)
    base = module.base_layer(x)
    out = of_a.weight.dtype if getattr(module, "cast_input_dtype_enabled", True) else x.dtype
    if p or out != x.dtype:
        x = dropped(x, p, seed_for(x) if p else 0, out)
    b = of_b(of_a(x))
    if not (base.shape == b.shape and can_run(base, b)):
        return (base + b * scale).to(base.dtype)
    return added(base, b, float(scale))


def dropped(x: Tensor, p: float, seed: int, out: torch.dtype) -> Tensor:
    """Return ``dropout(x)`` in the dtype ``out``, with the mask of ``seed``."""
    dtype = x.dtype
    run = partial(kernels().lora_input_forward, p=p, seed=seed, out=out)
    return fused(run, lambda _, dy: (kernels().lora_input_backward(dy, p, seed, dtype),), x, kept=slice(0))


def added(base: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return ``base + scale * b``, in the dtype of ``base``."""
    dtype = b.dtype

    def back(wanted: Any, dz: Tensor) -> Any:
        return dz, kernels().lora_output_backward(dz, scale, dtype) if wanted[1] else None

    return fused(partial(kernels().lora_output_forward, scale=scale), back, base, b, kept=slice(0))


FUSED_LORA = Op("fused_lora", _lora, check, is_implied=True, replaces_stock=True)
