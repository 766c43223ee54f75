"""T5, v1.0 (ReLU) and v1.1 (gated); the encoder's floor (a decoder block adds cross-attention: 11 + I)."""

from hf_memsave.arch.spec import Arch, Site

ARCH = Arch(
    model_type="t5",
    source="transformers.models.t5.modeling_t5",
    sites=(
        Site(cls="T5LayerNorm", op="t5_layer_norm", names={"eps": "variance_epsilon"}),
        Site(cls="T5DenseActDense", op="t5_mlp"),
        Site(cls="T5DenseGatedActDense", op="t5_gated_mlp"),
    ),
    floor="6 + I (gated: 6 + 2I)",
)
