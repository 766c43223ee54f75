r"""``fused_lora``: what stands around the two products of PEFT's LoRA adapter, as a kernel before and one after them.

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

from hf_memsave.ops.fused.kernels import can_run, draws_as_stock, fused, is_watched, kernels, seed_for
from hf_memsave.ops.op import Op

#: All that the forward of PEFT's layer names, where it computes what is written above.
_NAMES = frozenset(
    """_check_forward_args pop VARIANT_KWARG_KEYS disable_adapters merged unmerge base_layer _mixed_batch_forward dtype
    lora_A keys active_adapters lora_B lora_dropout scaling _cast_input_dtype weight lora_variant forward to""".split()
)


def _lora(module: nn.Module, patch: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    name = None if args or kwargs or not isinstance(x, Tensor) else _the_adapter(module)
    parts: Any = module
    if name is None or not can_run(x, parts.lora_A[name].weight):
        return patch.stock.forward(module, x, *args, **kwargs)
    dropout = parts.lora_dropout[name]
    p = dropout.p if type(dropout) is nn.Dropout and dropout.training else 0.0
    is_plain = type(dropout) in (nn.Dropout, nn.Identity) and not (
        is_watched(dropout) or getattr(dropout, "inplace", False)
    )
    if not is_plain or p == 1 or (p and draws_as_stock(x, patch)):
        return patch.stock.forward(module, x)
    base = parts.base_layer(x)
    out = parts.lora_A[name].weight.dtype if getattr(module, "cast_input_dtype_enabled", True) else x.dtype
    if p or out != x.dtype:
        x = dropped(x, p, seed_for(x) if p else 0, out)
    b, scale = parts.lora_B[name](parts.lora_A[name](x)), parts.scaling[name]
    if not (base.shape == b.shape and type(scale) in (int, float) and can_run(base, b)):
        return (base + b * scale).to(base.dtype)
    return added(base, b, float(scale))


def _the_adapter(module: Any) -> str | None:
    """The name of the only adapter that is active, if it is plain LoRA and not merged."""
    if module.disable_adapters or module.merged:
        return None
    names = [name for name in module.active_adapters if name in module.lora_A]
    return names[0] if len(names) == 1 and names[0] not in module.lora_variant else None


def dropped(x: Tensor, p: float, seed: int, out: torch.dtype) -> Tensor:
    """``dropout(x)`` in the dtype ``out``, with the mask of a seed."""
    dtype = x.dtype

    def back(wanted: Any, dy: Tensor) -> Any:
        return (kernels().lora_input_backward(dy, p, seed, dtype),)

    return fused(partial(kernels().lora_input_forward, p=p, seed=seed, out=out), back, x, kept=slice(0))


def added(base: Tensor, b: Tensor, scale: float) -> Tensor:
    """``base + scale * b``, in the dtype of ``base``."""
    dtype = b.dtype

    def back(wanted: Any, dz: Tensor) -> Any:
        return dz, kernels().lora_output_backward(dz, scale, dtype) if wanted[1] else None

    return fused(partial(kernels().lora_output_forward, scale=scale), back, base, b, kept=slice(0))


def _has_no_kernel(module: nn.Module, value: Any) -> str:
    forwards = (vars(cls).get("forward") for cls in type(module).__mro__ if "_memsave_patch" not in vars(cls))
    code = getattr(next(found for found in forwards if found is not None), "__code__", None)
    unknown = {"no code"} if code is None else set(code.co_names) - _NAMES
    return f"its forward has {', '.join(sorted(unknown))}: expected that of PEFT 0.21" if unknown else ""


FUSED_LORA = Op("fused_lora", _lora, _has_no_kernel, is_implied=True, in_place="exact")
