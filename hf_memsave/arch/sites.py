"""Full name of a stock class -> its kind, for what a configuration approximates, samples or leaves to stock.

The exact floor needs no table: a norm or activation that stands nowhere here is recomputed like everything else.
"""

from __future__ import annotations

import re

from torch import nn


def path_of(cls: type[nn.Module]) -> str:
    """Return the full name of a class; a patched class has its stock class's."""
    return f"{cls.__module__}.{cls.__qualname__}"


def in_models(models: str, suffix: str) -> list[str]:
    """Return full names of classes of Transformers' models; that of ``Qwen2Moe`` is defined in ``qwen2_moe``."""
    files = {model: re.sub(r"(?<=\d)(?=[A-Z])", "_", model).lower() for model in models.split()}
    return [f"transformers.models.{file}.modeling_{file}.{model}{suffix}" for model, file in files.items()]


#: Norms that compute ``weight * (x * rsqrt(mean(x²) + eps)).to(x.dtype)``, as LLaMA's does.
LIKE_LLAMA = in_models("Llama Mistral Mixtral Phi3 Qwen2 Qwen2Moe Qwen3 Qwen3Moe Granite SmolLM3", "RMSNorm")
#: Activations -> their names in ``ops/approximate/inverse.py``.
ACTIVATIONS = {
    "torch.nn.modules.activation.GELU": "gelu", "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu_tanh", "transformers.activations.NewGELUActivation": "new_gelu",
    "torch.nn.modules.activation.SiLU": "silu", "transformers.activations.SiLUActivation": "silu",
    "transformers.activations.QuickGELUActivation": "quick_gelu",
}  # fmt: skip
#: A norm's op is ``output_norm``, an activation's ``activation``.
KIND_OF_CLASS = {
    "torch.nn.modules.normalization.LayerNorm": "norm",
    **dict.fromkeys([*in_models("T5", "LayerNorm"), *LIKE_LLAMA], "norm"),
    **dict.fromkeys(ACTIVATIONS, "activation"),
}
#: Linears, whose weight gradients can be sampled.
LINEARS = ("torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D")
#: Linears whose own forward runs again; not bitsandbytes' 8-bit one, whose autograd node hides what it keeps.
OWN_FORWARD = (
    "bitsandbytes.nn.modules.Linear4bit", "hqq.core.quantize.HQQLinear", "optimum.quanto.nn.qlinear.QLinear",
)  # fmt: skip
#: Linears that can run again.
RUN_AGAIN = (*LINEARS, *OWN_FORWARD)
#: Modules whose autograd nodes keep tensors where no tape sees them -> the op that helps.
HIDDEN = {"bitsandbytes.nn.modules.Linear8bitLt": "linear_8bit"}
#: PEFT's plain LoRA layers -> what is converted to the base layer's dtype: the sum, or the adapter's summand.
LORA = {
    "peft.tuners.lora.layer.Linear": "sum",
    **dict.fromkeys((f"peft.tuners.lora.bnb.{name}" for name in ("Linear4bit", "Linear8bitLt")), "summand"),
}

#: Rung below the floor -> the linears that it adds to the ones that run again, by their paths in a block.
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
    """Return whether the linear at ``path``, maybe wrapped by adapters, runs again where ``last`` is the last rung."""
    taken = "|".join(list(_RUNGS.values())[: list(_RUNGS).index(last) + 1])
    return re.fullmatch(rf"(.*\.)?({taken})(\.linear)?(\.base_layer)?", path) is not None


def first_of_experts(module: nn.Module) -> list[str]:
    """Return the names of expert weights: 3-D parameters, a matrix an expert, except a down projection's."""
    named = module._parameters.items() if not type(module).__module__.startswith("torch.nn.") else ()  # convolutions
    return [name for name, p in named if p is not None and p.dim() == 3 and "down" not in name]


def kind_of(cls: type[nn.Module]) -> str | None:
    """Return the kind by which configurations leave a class to stock: by table, base class or name; None if none."""
    if (known := KIND_OF_CLASS.get(path_of(cls))) is not None:
        return known
    if any(base.__module__ == "peft.tuners.tuners_utils" for base in cls.__mro__) and hasattr(cls, "_cast_input_dtype"):
        return "lora"
    if cls.__name__.endswith("Norm"):
        return "norm"
    if cls.__module__ in ("torch.nn.modules.activation", "transformers.activations"):
        return None if cls.__name__ == "MultiheadAttention" else "activation"
    return "attention" if cls.__name__.endswith("Attention") else None
