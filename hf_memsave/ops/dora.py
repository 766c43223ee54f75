r"""``dora``: the part of PEFT's DoRA that scales a layer's output by a learned magnitude per column.

Forward, with x ``[*, in]``, base weight W ``[out, in]``, s = magnitude / ‖W + scaling · B A‖ ``[1, out]``::

    y = (s - 1) · (x Wᵀ) + s · (B A x) · scaling

Kept for backward, per target::

    eager    x Wᵀ, B A x and A x in x's dtype; where x is dropped or W quantized, also W in x's dtype
    here     x Wᵀ and A x                              (W is cast or dequantized again, B A x is made again from A x)

x Wᵀ stays: the magnitude's gradient is a sum of products with it, and to make it again is a product of full width.
Exact: stock's own operations run under autograd in stock's order.
Source: Liu et al. (2024), arXiv:2402.09353; ``DoraLinearLayer`` of PEFT.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hf_memsave.ops.cast import cast
from hf_memsave.ops.op import Binding, KeptBytes, Op
from hf_memsave.tape import promise


def kept_bytes(rows: int, out_features: int, rank: int, itemsize: int) -> KeptBytes:
    """For one target, beyond its input; no dropout, weights and adapters in one dtype."""
    return KeptBytes(rows * (2 * out_features + rank) * itemsize, rows * (out_features + rank) * itemsize)


def _dora(
    module: Any,
    binding: Binding,
    x: Tensor,
    *,
    lora_A: nn.Linear,
    lora_B: nn.Linear,
    scaling: float,
    base_layer: nn.Module,
    base_result: Tensor | None = None,
    adapter_name: str = "default",
) -> Tensor:
    from peft.utils.other import transpose

    lora_weight = module.get_lora_weight(lora_A=lora_A, lora_B=lora_B, adapter_name=adapter_name).to(x.dtype)
    weight = cast(_dequantized(base_layer), x.dtype)
    norm = module.get_weight_norm(
        weight=weight, lora_weight=lora_weight.detach(), scaling=scaling, adapter_name=adapter_name
    ).detach()
    scale = (module.weight / norm).view(1, -1)
    lora_result = _thin_product(lora_A(x), lora_B)
    if base_result is None:
        base_result = F.linear(x, transpose(weight, module.fan_in_fan_out))
    elif base_layer.bias is not None:
        base_result = base_result - base_layer.bias
    return (scale - 1) * base_result + scale * lora_result * scaling


def _thin_product(hidden: Tensor, lora_b: nn.Module) -> Tensor:
    """``lora_b(hidden)``, promised where it is that product alone: its inner dimension is the adapter's rank."""
    product = lora_b(hidden)
    cls, own = type(lora_b), vars(lora_b)
    is_linear = (cls.__module__, cls.__name__) == (nn.Linear.__module__, nn.Linear.__name__)
    if not is_linear or "forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return product
    bias = () if lora_b.bias is None else (lora_b.bias,)
    return promise(product, F.linear, hidden, lora_b.weight, *bias)


def _dequantized(base_layer: Any) -> Tensor:
    """The base weight; of NF4 and FP4 a promised copy in full precision."""
    from peft.utils.integrations import dequantize_module_weight

    weight = dequantize_module_weight(base_layer)
    quantized: Any = getattr(base_layer, "weight", None)
    if type(quantized).__name__ == "Params4bit":
        # Detached it shares the version counter, so a change before backward is seen.
        promise(weight, partial(_dequantize_4bit, state=quantized.quant_state), quantized.detach())
    return weight


def _dequantize_4bit(quantized: Tensor, state: Any) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(quantized, state)


def _note(module: nn.Module, binding: Binding) -> str:
    return "keeps the base layer's result: the magnitude's gradient is a sum of products with it"


_EXPRESSION = """
def forward(self, x, *, lora_A, lora_B, scaling, base_layer, base_result=None, adapter_name="default"):
    lora_weight = self.get_lora_weight(lora_A=lora_A, lora_B=lora_B, adapter_name=adapter_name)
    lora_weight = lora_weight.to(x.dtype)
    magnitude = self.weight
    weight = dequantize_module_weight(base_layer)
    weight = weight.to(x.dtype)
    weight_norm = self.get_weight_norm(
        weight=weight, lora_weight=lora_weight.detach(), scaling=scaling, adapter_name=adapter_name
    )
    weight_norm = weight_norm.detach()
    mag_norm_scale = (magnitude / weight_norm).view(1, -1)
    lora_result = lora_B(lora_A(x))
    bias = None
    if base_result is not None:
        bias = base_layer.bias
        if bias is not None:
            base_result = base_result - bias
    else:
        base_result = F.linear(x, transpose(weight, self.fan_in_fan_out))
    result_dora = (mag_norm_scale - 1) * base_result + mag_norm_scale * lora_result * scaling
    return result_dora
"""

DORA = Op("dora", "lora", _dora, expressions=(_EXPRESSION,), note=_note)
