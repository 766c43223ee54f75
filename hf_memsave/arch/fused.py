"""The table: full name of a stock class -> the op that fuses it, where Triton runs."""

from __future__ import annotations

from typing import Any, NamedTuple

from hf_memsave.arch.sites import LIKE_LLAMA
from hf_memsave.ops.elementwise import ACTIVATIONS
from hf_memsave.ops.fused.rms_norm import Style


class Fused(NamedTuple):
    """How a class is fused.

    Attributes:
        kind: By which a configuration leaves it to stock.
        op: The name of the op.
        value: What the op needs to know of the class.
    """

    kind: str
    op: str
    value: Any = None


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
    **{path: Fused("activation", "fused_activation") for one in ACTIVATIONS.values() for path in one.modules},
}
