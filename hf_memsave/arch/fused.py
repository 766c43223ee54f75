"""Tables of the ops that fuse stock classes where Triton runs, by full class name or by the code of the forward."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from pkgutil import resolve_name
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

from hf_memsave.arch.sites import ACTIVATIONS, LIKE_LLAMA, in_models, path_of


class Fused(NamedTuple):
    """The op that fuses a stock class, and what the op needs to know of it."""

    kind: str  # by which a configuration leaves the class to stock
    op: str
    value: Any = None  # of a norm: its style, and the name of the attribute that holds its epsilon
    draws: bool = False  # it draws dropout masks; the op's value says whether they may differ from stock's


#: MLPs whose forward computes ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``.
_GATED = in_models("Llama Mistral Qwen2 Qwen3 Gemma Gemma2 Gemma3 Granite Olmo2 SmolLM3", "MLP")
FUSED = {
    **dict.fromkeys(LIKE_LLAMA, Fused("norm", "fused_rms_norm", ("llama", "variance_epsilon"))),
    # These norms multiply by 1 + weight, in fp32.
    **dict.fromkeys(in_models("Gemma Gemma2 Gemma3", "RMSNorm"), Fused("norm", "fused_rms_norm", ("gemma", "eps"))),
    **dict.fromkeys(in_models("T5", "LayerNorm"), Fused("norm", "fused_rms_norm", ("t5", "variance_epsilon"))),
    **dict.fromkeys(_GATED, Fused("activation", "fused_gated")),
    "peft.tuners.lora.layer.Linear": Fused("lora", "fused_lora", draws=True),
    **dict.fromkeys(ACTIVATIONS, Fused("activation", "fused_activation")),
}

#: The rotary function's name in Transformers' files; the models whose version the kernel has: of whole heads, a part.
ROTARY_NAME = "apply_rotary_pos_emb"
ROTARY = ("llama", "phi3")
#: Modules known by the code of their forward, which the files of many models repeat.
ALIKE = {"transformers.models.bert.modeling_bert.BertSelfOutput": Fused("norm", "fused_dropout_norm", draws=True)}


def fused_of(cls: type[nn.Module]) -> Fused | None:
    """Return how a stock class is fused, by its name or its code; None if it is not, or its forward was replaced."""
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
    if ROTARY_NAME in forward.__code__.co_names and _turns(forward.__globals__):
        return Fused("attention", "fused_rotary")
    return next((fused for path, fused in ALIKE.items() if _is_same(forward, resolve_name(path).forward)), None)


def _turns(names: dict[str, Any]) -> bool:
    """Return whether the rotary embedding among a file's global ``names`` is one that the kernel computes."""
    files = (importlib.import_module(f"transformers.models.{model}.modeling_{model}") for model in ROTARY)
    return any(all(_is_same(names.get(p), getattr(file, p)) for p in (ROTARY_NAME, "rotate_half")) for file in files)


def _is_same(found: Any, known: Callable[..., Any]) -> bool:
    """Return whether a function has the code of a known one."""
    return isinstance(found, FunctionType) and _text(found.__code__) == _text(known.__code__)


def _text(code: CodeType) -> Any:
    """Return the parts of a code object to compare functions by: all but docstring and annotations."""
    constants = code.co_consts[1:] if code.co_consts and isinstance(code.co_consts[0], str) else code.co_consts
    return code.co_code, code.co_names, code.co_varnames, code.co_argcount, constants
