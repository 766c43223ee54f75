"""Phi-3: LLaMA with fused qkv and gate-up projections."""

from hf_memsave.arch.spec import Arch, Site

ARCH = Arch(
    model_type="phi3",
    source="transformers.models.phi3.modeling_phi3",
    sites=(
        Site(cls="Phi3RMSNorm", op="rms_norm", names={"eps": "variance_epsilon"}),
        Site(
            cls="Phi3MLP",
            op="chunked_gated_mlp",
            names={"gate_up": "gate_up_proj", "down": "down_proj", "act": "activation_fn"},
        ),
    ),
    floor="4 + 2g + 2I",
)
