"""The table: full name of a stock class -> its kind, for what a configuration approximates, samples or leaves to stock.

A norm or activation that stands nowhere here is remade exactly, like everything else.
"""

from __future__ import annotations

from torch import nn

from hf_memsave.ops.elementwise import ACTIVATIONS
from hf_memsave.ops.op import path_of
from hf_memsave.ops.run_again import OWN_FORWARD

#: Where norms that say ``weight * (x * rsqrt(mean(x²) + eps)).to(x.dtype)``, as LLaMA's does, are defined.
LIKE_LLAMA = {
    "llama": "LlamaRMSNorm",
    "mistral": "MistralRMSNorm",
    "mixtral": "MixtralRMSNorm",
    "phi3": "Phi3RMSNorm",
    "qwen2": "Qwen2RMSNorm",
    "qwen2_moe": "Qwen2MoeRMSNorm",
    "qwen3": "Qwen3RMSNorm",
    "qwen3_moe": "Qwen3MoeRMSNorm",
    "granite": "GraniteRMSNorm",
    "smollm3": "SmolLM3RMSNorm",
}
#: Full name -> kind; a norm's op is ``output_norm``, an activation's ``activation``.
KIND_OF_CLASS = {
    "torch.nn.modules.normalization.LayerNorm": "norm",
    "transformers.models.t5.modeling_t5.T5LayerNorm": "norm",
    **{f"transformers.models.{file}.modeling_{file}.{cls}": "norm" for file, cls in LIKE_LLAMA.items()},
    **{path: "activation" for activation in ACTIVATIONS.values() for path in activation.modules},
}
#: Linears, whose weight gradients can be sampled.
LINEARS = ("torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D")
#: Linears that can run again.
RUN_AGAIN = (*LINEARS, *OWN_FORWARD)
#: What keeps tensors where no tape can see them, and the op that helps.
HIDDEN = {"bitsandbytes.nn.modules.Linear8bitLt": "linear_8bit"}


def kind_of(cls: type[nn.Module]) -> str | None:
    """What a configuration that leaves a kind to stock means by it: modules whose class name says so."""
    if (known := KIND_OF_CLASS.get(path_of(cls))) is not None:
        return known
    if any(base.__module__ == "peft.tuners.tuners_utils" for base in cls.__mro__) and hasattr(cls, "_cast_input_dtype"):
        return "lora"
    if cls.__name__.endswith("Norm"):
        return "norm"
    if cls.__module__ in ("torch.nn.modules.activation", "transformers.activations"):
        return None if cls.__name__ == "MultiheadAttention" else "activation"
    return "attention" if cls.__name__.endswith("Attention") else None
