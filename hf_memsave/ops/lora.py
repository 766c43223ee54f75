r"""``lora``: the input of a PEFT adapter, converted to the adapter's dtype.

PEFT adds, for each target, ``lora_B(lora_A(dropout(cast(x)))) * scaling`` to the base layer's output; the cast is to
the adapter's dtype (fp32 by default, whatever the model's). Nothing of that is rewritten here. The adapter's own class
runs, merges and saves; only its cast becomes a promise. Its dropout is an ``nn.Dropout``, its ``lora_A`` and ``lora_B``
are ``nn.Linear``: those have ops of their own.

Kept for backward, per target, with x ``[*, in]`` in the model's dtype and adapters of rank r::

    eager    x in the adapter's dtype, the dropout's noise, the dropped x, and lora_A's output [*, r]
    here     lora_A's output, and the generator's state for the dropout        (x is kept once, or promised)

Exact, for every PEFT method that converts its input by ``_cast_input_dtype``.
Source: Hu et al. (2021), arXiv:2106.09685.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn

from hf_memsave.ops.cast import cast
from hf_memsave.ops.op import Binding, Op

METHOD = "_cast_input_dtype"


def _cast_input(module: nn.Module, binding: Binding, x: Any, dtype: torch.dtype) -> Any:
    if not isinstance(x, Tensor) or not getattr(module, "cast_input_dtype_enabled", True):
        return getattr(binding.stock, METHOD)(module, x, dtype)
    return cast(x, dtype)


def _note(module: Any, binding: Binding) -> str:
    """PEFT's other methods, and LoRA's other variants, keep what they compute by themselves."""
    method = re.match(r"peft\.tuners\.(\w+)", type(module).__module__)
    variants = {type(v).__name__ for v in getattr(module, "lora_variant", {}).values()} - {"DoraLinearVariant"}
    own = [method[1]] if method is not None and method[1] != "lora" else sorted(variants)
    return f"what {' and '.join(own)} computes by itself is kept as in stock" if own else ""


_EXPRESSION = """
def _cast_input_dtype(self, x, dtype):
    if x is None:
        return None
    cast_input_dtype_enabled = getattr(self, "cast_input_dtype_enabled", True)
    if (not cast_input_dtype_enabled) or (x.dtype == dtype):
        return x
    return x.to(dtype=dtype)
"""

LORA = Op("lora", "lora", _cast_input, expressions=(_EXPRESSION,), note=_note, method=METHOD)
