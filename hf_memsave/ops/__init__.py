"""One op per file; this is the table of those that replace a module's forward."""

from hf_memsave.ops.activation import ACTIVATION
from hf_memsave.ops.block import BLOCK
from hf_memsave.ops.dora import DORA
from hf_memsave.ops.dropout import DROPOUT
from hf_memsave.ops.gated_mlp import CHUNKED_GATED_MLP, GATED_MLP
from hf_memsave.ops.layer_norm import LAYER_NORM
from hf_memsave.ops.linear import CONV1D, LINEAR
from hf_memsave.ops.linear_8bit import LINEAR_8BIT
from hf_memsave.ops.lora import LORA
from hf_memsave.ops.new_gelu import NEW_GELU
from hf_memsave.ops.op import Binding, Op
from hf_memsave.ops.rms_norm import RMS_NORM, T5_LAYER_NORM
from hf_memsave.ops.t5_mlp import T5_GATED_MLP, T5_MLP

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        ACTIVATION,
        BLOCK,
        CHUNKED_GATED_MLP,
        CONV1D,
        DORA,
        DROPOUT,
        GATED_MLP,
        LAYER_NORM,
        LINEAR,
        LINEAR_8BIT,
        LORA,
        NEW_GELU,
        RMS_NORM,
        T5_GATED_MLP,
        T5_LAYER_NORM,
        T5_MLP,
    )
}

__all__ = ["OPS", "Binding", "Op"]
