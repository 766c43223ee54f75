"""Mistral."""

from hf_memsave.arch.llama import GATED_MLP_NAMES
from hf_memsave.arch.spec import Arch, Site

ARCH = Arch(
    model_type="mistral",
    source="transformers.models.mistral.modeling_mistral",
    sites=(
        Site(cls="MistralRMSNorm", op="rms_norm", names={"eps": "variance_epsilon"}),
        Site(cls="MistralMLP", op="gated_mlp", names=GATED_MLP_NAMES),
    ),
    floor="4 + 2g + 2I",
)
