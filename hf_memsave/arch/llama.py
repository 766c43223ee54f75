"""LLaMA, and the shape of its MLP and norm that Mistral shares."""

from hf_memsave.arch.spec import Arch, Site

GATED_MLP_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj", "act": "act_fn"}

ARCH = Arch(
    model_type="llama",
    source="transformers.models.llama.modeling_llama",
    sites=(
        Site(cls="LlamaRMSNorm", op="rms_norm", names={"eps": "variance_epsilon"}),
        Site(cls="LlamaMLP", op="gated_mlp", names=GATED_MLP_NAMES),
    ),
    floor="4 + 2g + 2I",
)
