r"""``fused_lora``: what stands around the two products of PEFT's LoRA adapter, as a kernel before and one after them.

Forward, with x in A's dtype, and backward for an incoming gradient dz::

    y = dropout(x)    b = B(A(y))    z = base + s b                one kernel for y, one for z
    dbase = dz        db = s dz      dx = dropout(dy)              one kernel each, the same mask

Kept for backward, beside what the frozen layer keeps::

    stock    x in A's dtype, a byte an element of the mask, y in A's dtype
    here     nothing: y is drawn again from x and a seed

Exact as mathematics, not stock's bits: all is computed in fp32 and rounded once. **The masks are not stock's**: they
are of the same distribution (p in steps of 2⁻¹⁶), from a seed that the model's generator gives. Gradients of gradients
are refused. Source: Hu et al. (2022), arXiv:2106.09685.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_memsave.ops.fused.kernels import can_run, draws_as_stock, is_watched, kernels, seed_for, taped
from hf_memsave.ops.op import Op, once_differentiable

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
        how = p, seed_for(x) if p else 0, out
        x = taped(_Input, (x, how), (partial(_input_again, how=how), (x,)))
    b, scale = parts.lora_B[name](parts.lora_A[name](x)), parts.scaling[name]
    if not (base.shape == b.shape and type(scale) in (int, float) and can_run(base, b)):
        return (base + b * scale).to(base.dtype)
    again = partial(kernels().lora_output_forward, scale=float(scale))
    z: Tensor = taped(_Output, (base, b, float(scale)), (again, (base, b)))
    return z


def _the_adapter(module: Any) -> str | None:
    """The name of the only adapter that is active, if it is plain LoRA and not merged."""
    if module.disable_adapters or module.merged:
        return None
    names = [name for name in module.active_adapters if name in module.lora_A]
    return names[0] if len(names) == 1 and names[0] not in module.lora_variant else None


def _input_again(x: Tensor, how: tuple[float, int, torch.dtype]) -> Tensor:
    return kernels().lora_input_forward(x, *how)


class _Input(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: tuple[float, int, torch.dtype]) -> Tensor:
        ctx.how, ctx.dtype = how[:2], x.dtype
        ctx.set_materialize_grads(False)
        return _input_again(x, how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return kernels().lora_input_backward(dy, *ctx.how, ctx.dtype), None


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, base: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.dtype = scale, b.dtype
        ctx.set_materialize_grads(False)
        return kernels().lora_output_forward(base, b, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> Any:
        db = kernels().lora_output_backward(dz, ctx.scale, ctx.dtype) if ctx.needs_input_grad[1] else None
        return dz, db, None


def _has_no_kernel(module: nn.Module, value: Any) -> str:
    forwards = (vars(cls).get("forward") for cls in type(module).__mro__ if "_memsave_patch" not in vars(cls))
    code = getattr(next(found for found in forwards if found is not None), "__code__", None)
    unknown = {"no code"} if code is None else set(code.co_names) - _NAMES
    return f"its forward has {', '.join(sorted(unknown))}: expected that of PEFT 0.21" if unknown else ""


FUSED_LORA = Op("fused_lora", _lora, _has_no_kernel, is_implied=True, in_place="exact")
