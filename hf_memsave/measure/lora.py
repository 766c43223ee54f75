"""LoRA adapters for a model to be measured, and the frozen 4-bit base model of QLoRA."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_memsave.config.lora import Lora
from hf_memsave.device import HALVES
from hf_memsave.errors import MeasureError

#: Elements that share a scale, and scales that share a scale of their own (double quantization).
_BLOCK, _SCALES = 64, 256
_COMPUTE = torch.bfloat16


def add_adapters(model: PreTrainedModel, lora: Lora) -> None:
    """Freeze the model and inject LoRA adapters into it; MeasureError if PEFT refuses."""
    from peft import LoraConfig, inject_adapter_in_model

    own = next(p.dtype for p in model.parameters() if p.is_floating_point())
    targets = lora.targets if lora.targets == "all-linear" else lora.targets.split("+")
    same = {"r": lora.r, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "use_dora": lora.dora}
    try:
        inject_adapter_in_model(LoraConfig(**same, target_modules=targets), model)
    except ValueError as error:
        raise MeasureError(f"LoRA: {error} Name modules of {type(model).__name__} with targets=a+b.") from error
    for parameter in model.parameters():
        if parameter.requires_grad:  # on the meta device, PEFT leaves them in fp32
            parameter.data = parameter.data.to(torch.float32 if lora.dtype == "fp32" else own)


def quantize(model: PreTrainedModel) -> None:
    """Quantize weights of linears to NF4, as bitsandbytes does, and cast the rest to fp32, as PEFT does. In place."""
    # As in Transformers, the output embedding, classifiers and modules that the class keeps in fp32 are left.
    output, wide = model.get_output_embeddings(), set(model._keep_in_fp32_modules or ())
    for module in list(model.modules()):
        for name, child in module.named_children():
            is_left = child is output or name in wide or name.startswith(("classifier", "score"))
            if type(child) is nn.Linear and not is_left:
                setattr(module, name, _linear_class()(child) if child.weight.is_meta else _quantized(child))
    model.is_loaded_in_4bit = True
    for p in model.parameters():
        p.requires_grad_(False)
        if p.dtype in HALVES:
            p.data = p.data.float()


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes.nn
    except ImportError as error:
        raise MeasureError("quantized: needs bitsandbytes, which is missing. Run: pip install bitsandbytes") from error
    return bitsandbytes.nn


def _quantized(linear: nn.Linear) -> nn.Module:
    home, how = _bitsandbytes(), {"compress_statistics": True, "quant_type": "nf4"}
    made: nn.Linear = home.Linear4bit(1, 1, linear.bias is not None, compute_dtype=_COMPUTE, **how, device="meta")
    made.in_features, made.out_features, made.bias = linear.in_features, linear.out_features, linear.bias
    made.weight = home.Params4bit(linear.weight.detach(), requires_grad=False, **how, module=made)
    return made.to(linear.weight.device)  # which quantizes it


@cache
def _linear_class() -> Any:
    class NF4Linear(_bitsandbytes().Linear4bit):  # type: ignore[misc]
        """``Linear4bit`` without values or kernels; PEFT recognizes it by its class."""

        def __init__(self, like: nn.Linear) -> None:
            nn.Module.__init__(self)
            self.in_features, self.out_features, self.bias = like.in_features, like.out_features, like.bias
            self.compute_dtype = _COMPUTE
            of, scales = like.weight, math.ceil(like.weight.numel() / _BLOCK)
            weight: Any = nn.Parameter(of.new_empty(of.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)
            weight.compress_statistics, weight.quant_type = True, "nf4"
            self.weight = weight
            self.register_buffer("scales", of.new_empty(scales, dtype=torch.uint8), persistent=False)
            self.register_buffer("of_scales", of.new_empty(math.ceil(scales / _SCALES), dtype=torch.float32), False)

        def forward(self, x: Tensor) -> Tensor:
            bias = None if self.bias is None else self.bias.to(_COMPUTE)
            z: Tensor = _Product.apply(x.to(_COMPUTE), self.weight, (self.out_features, self.in_features), bias)
            return z.to(x.dtype)

    NF4Linear.__module__, NF4Linear.__qualname__ = "bitsandbytes.nn.modules", "Linear4bit"  # whose forward runs again
    return NF4Linear


class _Product(torch.autograd.Function):
    """bitsandbytes' ``MatMul4Bit``, which keeps only the packed weight and unpacks it in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, shape: tuple[int, int], bias: Tensor | None) -> Tensor:
        ctx.packed, ctx.shape = packed, shape
        return F.linear(x, packed.new_empty(shape, dtype=x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy @ ctx.packed.new_empty(ctx.shape, dtype=dy.dtype), None, None, None
