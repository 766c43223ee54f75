"""Full name of a stock class -> its kind, for what a configuration approximates, samples or leaves to stock.

The exact floor needs no table: a norm or activation that stands nowhere here is recomputed like everything else.
"""

from __future__ import annotations

import re

from torch import nn


def path_of(cls: type[nn.Module]) -> str:
    """The full name of a class; a patched one has that of its stock class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def in_models(classes: str) -> list[str]:
    """The full names of classes of Transformers, each ``Prefix+Suffix``; ``Qwen2Moe`` is defined in ``qwen2_moe``."""
    found = []
    for prefix, suffix in (cls.split("+") for cls in classes.split()):
        file = re.sub(r"(?<=\d)(?=[A-Z])", "_", prefix).lower()
        found.append(f"transformers.models.{file}.modeling_{file}.{prefix}{suffix}")
    return found


#: Norms that say ``weight * (x * rsqrt(mean(x²) + eps)).to(x.dtype)``, as LLaMA's does.
LIKE_LLAMA = in_models(
    "Llama+RMSNorm Mistral+RMSNorm Mixtral+RMSNorm Phi3+RMSNorm Qwen2+RMSNorm Qwen2Moe+RMSNorm Qwen3+RMSNorm "
    "Qwen3Moe+RMSNorm Granite+RMSNorm SmolLM3+RMSNorm"
)
#: Activations -> their names in ``ops/approximate/inverse.py``.
ACTIVATIONS = {
    "torch.nn.modules.activation.GELU": "gelu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.NewGELUActivation": "new_gelu",
    "torch.nn.modules.activation.SiLU": "silu",
    "transformers.activations.SiLUActivation": "silu",
    "transformers.activations.QuickGELUActivation": "quick_gelu",
}
#: A norm's op is ``output_norm``, an activation's ``activation``.
KIND_OF_CLASS = {
    "torch.nn.modules.normalization.LayerNorm": "norm",
    **dict.fromkeys([*in_models("T5+LayerNorm"), *LIKE_LLAMA], "norm"),
    **dict.fromkeys(ACTIVATIONS, "activation"),
}
#: Linears, whose weight gradients can be sampled.
LINEARS = ("torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D")
#: Linears whose own forward runs again; of bitsandbytes' in 8 bits, what they keep cannot be seen.
OWN_FORWARD = (
    "bitsandbytes.nn.modules.Linear4bit", "hqq.core.quantize.HQQLinear", "optimum.quanto.nn.qlinear.QLinear",
)  # fmt: skip
#: Linears that can run again.
RUN_AGAIN = (*LINEARS, *OWN_FORWARD)
#: What keeps tensors where no tape can see them, and the op that helps.
HIDDEN = {"bitsandbytes.nn.modules.Linear8bitLt": "linear_8bit"}
#: PEFT's layers of plain LoRA -> what of a sum is converted to the base layer's dtype: all of it, or what is added.
LORA = {
    "peft.tuners.lora.layer.Linear": "sum",
    **dict.fromkeys((f"peft.tuners.lora.bnb.{name}" for name in ("Linear4bit", "Linear8bitLt")), "summand"),
}

#: Rung below the floor -> the linears that run again there beside those of the rungs before, by their paths in a block.
_RUNGS = {
    "o_proj": r"(o|o_[ab]|out|output)_proj|out_lin|linear_out|"
    r"\w*[Aa]tt(n|ention)\.(o|Wo|output|final|dense|c_proj|proj\w*|\w*out(put)?[._](dense|proj))",
    # RWKV's MLP has a "value", which is its down projection.
    "qkv": r"(?<!feed_forward\.)(\w*_)?[Ww]?([qkv]|kv|qkv|query|key|value)(_\w+)?|c_attn|in_proj\w*",
    "up": r"up_proj|proj_up|(\w*_)?(fc|lin|linear|dense)1|c_fc|fc_in|input_linear|dense_h_to_4h|[Ww]i(_1)?|w3|"
    r"\w*intermediate\w*\.dense|intermediate(_dense)?",
    "gate": r"gate_proj|gate_up_proj|proj_up_gate|wi_0|w1",
}


def is_run_again(path: str, last: str) -> bool:
    """Whether the linear at ``path``, which adapters may wrap, runs again where ``last`` is the last rung taken."""
    taken = "|".join(list(_RUNGS.values())[: list(_RUNGS).index(last) + 1])
    return re.fullmatch(rf"(.*\.)?({taken})(\.linear)?(\.base_layer)?", path) is not None


def first_of_experts(module: nn.Module) -> list[str]:
    """The names of parameters of three dimensions, a matrix an expert, that are not those of a down projection."""
    named = module._parameters.items() if not type(module).__module__.startswith("torch.nn.") else ()  # convolutions
    return [name for name, p in named if p is not None and p.dim() == 3 and "down" not in name]


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
