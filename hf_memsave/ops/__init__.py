"""One op per file; this is the table of those that replace a module's forward."""

from hf_memsave.ops.activation import ACTIVATION
from hf_memsave.ops.approximate import approximable, from_output
from hf_memsave.ops.batch_norm import BATCH_NORM
from hf_memsave.ops.block import BLOCK
from hf_memsave.ops.channel_dropout import CHANNEL_DROPOUT
from hf_memsave.ops.convolution import CONVOLUTION
from hf_memsave.ops.dora import DORA
from hf_memsave.ops.dropout import DROPOUT
from hf_memsave.ops.eager_attention import EAGER_ATTENTION
from hf_memsave.ops.gated_mlp import CHUNKED_GATED_MLP, GATED_MLP
from hf_memsave.ops.group_norm import GROUP_NORM
from hf_memsave.ops.layer_norm import LAYER_NORM
from hf_memsave.ops.linear import CONV1D, LINEAR
from hf_memsave.ops.linear_8bit import LINEAR_8BIT
from hf_memsave.ops.lora import LORA
from hf_memsave.ops.new_gelu import NEW_GELU
from hf_memsave.ops.op import Binding, Op
from hf_memsave.ops.output_norm import layer_normed, rms_normed, t5_normed
from hf_memsave.ops.pooling import AVERAGE_POOL, MAX_POOL
from hf_memsave.ops.quick_gelu import QUICK_GELU
from hf_memsave.ops.rectifier import RECTIFIER
from hf_memsave.ops.rms_norm import RMS_NORM, T5_LAYER_NORM
from hf_memsave.ops.t5_mlp import T5_GATED_MLP, T5_MLP
from hf_memsave.ops.wta_crs import WTA_CRS

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        approximable(ACTIVATION),
        AVERAGE_POOL,
        BATCH_NORM,
        BLOCK,
        CHANNEL_DROPOUT,
        CHUNKED_GATED_MLP,
        CONV1D,
        CONVOLUTION,
        DORA,
        DROPOUT,
        EAGER_ATTENTION,
        GATED_MLP,
        GROUP_NORM,
        from_output(LAYER_NORM, layer_normed),
        LINEAR,
        LINEAR_8BIT,
        LORA,
        MAX_POOL,
        approximable(NEW_GELU),
        approximable(QUICK_GELU),
        RECTIFIER,
        from_output(RMS_NORM, rms_normed),
        T5_GATED_MLP,
        from_output(T5_LAYER_NORM, t5_normed),
        T5_MLP,
        WTA_CRS,
    )
}

__all__ = ["OPS", "Binding", "Op"]
