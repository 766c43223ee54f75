r"""``run_again``: a linear of a rung below the floor, run again in backward: its output is not kept.

Exact: the module's own forward, on an input that is kept or recomputed. At LLaMA-3-8B's widths that costs 1/13 of a
block's products for o_proj, 3/4 for all up to the gate. A linear with the forward of ``nn.Linear`` or ``Conv1D`` is
known by its weight when called, and its class stays; the op is for 4-bit bitsandbytes, HQQ and optimum-quanto.
Source: Chen et al. (2016), arXiv:1604.06174; Korthikanti et al. (2022), arXiv:2205.05198.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_memsave.arch.sites import OWN_FORWARD, first_of_experts, path_of
from hf_memsave.ops.op import Op, not_parametrized
from hf_memsave.tape import current
from hf_memsave.tape.products import record_recomputed
from hf_memsave.tape.tensors import is_plain


def _linear(module: nn.Module, patch: Any, *args: Any, **kwargs: Any) -> Any:
    y = patch.stock.forward(module, *args, **kwargs)
    tape = current()
    if tape is not None and len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and is_plain(y):
        tape.forget_call(y)  # a quantized linear ends with a conversion, of what cannot be remade
        stock, own = patch.stock, module.parameters(recurse=False)
        record_recomputed(tape, y, lambda x, *_: stock.forward(module, x), (*args, *own), {})
    return y


def is_known_by_weight(module: nn.Module) -> bool:
    """Return whether a tape knows the module's product by its weight, so that its class need not change."""
    return type(module).forward in (nn.Linear.forward, Conv1D.forward) or bool(first_of_experts(module))


def _check(module: nn.Module, value: Any) -> str:
    if reason := not_parametrized(module, value):
        return reason
    how: Any = hasattr(module, "has_bias") and getattr(module.config, "_experts_implementation", None)
    if how and how != "eager" and (module.has_bias or how not in ("batched_mm", "grouped_mm")):
        return f"its {how} adds a bias in place, or is a kernel of its own. Use set_experts_implementation('eager')"
    if is_known_by_weight(module) or path_of(type(module)) in OWN_FORWARD:
        return ""
    if "_fsdp_wrapped_module" in module._modules:
        return "it is a unit of FSDP1. Wrap whole blocks, or patch before you wrap, where its output is kept"
    return "its forward is its own, and may not be fit to run twice"


RUN_AGAIN = Op("run_again", _linear, _check)
