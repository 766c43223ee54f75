"""The table: full name of a stock class -> the op that fuses it, where Triton runs."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

from hf_memsave.arch.sites import LIKE_LLAMA
from hf_memsave.ops.elementwise import ACTIVATIONS
from hf_memsave.ops.fused import rotary
from hf_memsave.ops.fused.rms_norm import Style
from hf_memsave.ops.op import path_of


class Fused(NamedTuple):
    """How a class is fused.

    Attributes:
        kind: By which a configuration leaves it to stock.
        op: The name of the op.
        value: What the op needs to know of the class.
        draws: Whether it draws masks of dropout, and needs to know instead whether it may.
    """

    kind: str
    op: str
    value: Any = None
    draws: bool = False


#: Where norms that multiply by 1 + weight, in fp32, are defined.
_LIKE_GEMMA = {"gemma": "GemmaRMSNorm", "gemma2": "Gemma2RMSNorm", "gemma3": "Gemma3RMSNorm"}
#: Where MLPs that say ``down_proj(act_fn(gate_proj(x)) * up_proj(x))`` are defined.
_GATED = {
    "llama": "LlamaMLP",
    "mistral": "MistralMLP",
    "qwen2": "Qwen2MLP",
    "qwen3": "Qwen3MLP",
    "gemma": "GemmaMLP",
    "gemma2": "Gemma2MLP",
    "gemma3": "Gemma3MLP",
    "granite": "GraniteMLP",
    "olmo2": "Olmo2MLP",
    "smollm3": "SmolLM3MLP",
}


def _in_models(classes: dict[str, str], fused: Fused) -> dict[str, Fused]:
    return {f"transformers.models.{file}.modeling_{file}.{cls}": fused for file, cls in classes.items()}


FUSED = {
    **_in_models(LIKE_LLAMA, Fused("norm", "fused_rms_norm", Style("llama"))),
    **_in_models(_LIKE_GEMMA, Fused("norm", "fused_rms_norm", Style("gemma", "eps"))),
    **_in_models({"t5": "T5LayerNorm"}, Fused("norm", "fused_rms_norm", Style("t5"))),
    **_in_models(_GATED, Fused("activation", "fused_gated")),
    "peft.tuners.lora.layer.Linear": Fused("lora", "fused_lora", draws=True),
    **{path: Fused("activation", "fused_activation") for one in ACTIVATIONS.values() for path in one.modules},
}

#: Where a rotary embedding is that the kernel computes: of whole heads; of a part of each, the rest copied.
ROTARY = ("llama", "phi3")
#: Modules known by the code of their forward, which the files of many models repeat.
ALIKE = {"transformers.models.bert.modeling_bert.BertSelfOutput": Fused("norm", "fused_dropout_norm", draws=True)}


def fused_of(cls: type[nn.Module]) -> Fused | None:
    """How a class is fused: by its name, or by code that is the very code of one that is known.

    Args:
        cls: Stock.

    Returns:
        None if it is not, or if its forward was set from elsewhere.
    """
    known: Any = cls
    return _fused_of(known, known.forward)


@functools.cache
def _fused_of(cls: Any, forward: Any) -> Fused | None:
    if (known := FUSED.get(path_of(cls))) is not None:
        owner = next(base for base in cls.__mro__ if "forward" in vars(base))
        return known if getattr(forward, "__module__", None) == owner.__module__ else None
    forward = inspect.unwrap(forward)
    if not isinstance(forward, FunctionType):
        return None
    if rotary.NAME in forward.__code__.co_names and _turns(forward.__globals__):
        return Fused("attention", "fused_rotary")
    return next((fused for path, fused in ALIKE.items() if _is_same(forward, _found(path).forward)), None)


def _turns(names: dict[str, Any]) -> bool:
    """Whether what a file calls a rotary embedding is one that the kernel computes."""
    parts = (rotary.NAME, "rotate_half")
    for model in ROTARY:
        known = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        if all(_is_same(names.get(part), getattr(known, part)) for part in parts):
            return True
    return False


def _found(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def _is_same(found: Any, known: Callable[..., Any]) -> bool:
    """Whether a function is written as a known one is."""
    return isinstance(found, FunctionType) and _text(found.__code__) == _text(known.__code__)


def _text(code: CodeType) -> Any:
    """What tells how a function is written, but for its docstring and annotations."""
    constants = code.co_consts[1:] if code.co_consts and isinstance(code.co_consts[0], str) else code.co_consts
    return code.co_code, code.co_names, code.co_varnames, code.co_argcount, constants
