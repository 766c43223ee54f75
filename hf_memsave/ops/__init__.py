"""Table of the ops that replace a module's forward, one a file; handlers of functions are in ``tape``."""

from hf_memsave.ops.approximate.activation import ACTIVATION
from hf_memsave.ops.approximate.output_norm import OUTPUT_NORM
from hf_memsave.ops.fused.activation import FUSED_ACTIVATION, FUSED_GATED
from hf_memsave.ops.fused.dropout_norm import FUSED_DROPOUT_NORM
from hf_memsave.ops.fused.lora import FUSED_LORA
from hf_memsave.ops.fused.rms_norm import FUSED_RMS_NORM
from hf_memsave.ops.fused.rotary import FUSED_ROTARY
from hf_memsave.ops.left_to_stock import LEFT_TO_STOCK
from hf_memsave.ops.linear_8bit import LINEAR_8BIT
from hf_memsave.ops.lora import LORA
from hf_memsave.ops.loss.lazy_head import LAZY_HEAD
from hf_memsave.ops.op import Op
from hf_memsave.ops.run_again import RUN_AGAIN
from hf_memsave.ops.sampled.eager_attention import EAGER_ATTENTION
from hf_memsave.ops.sampled.wta_crs import WTA_CRS

OPS: dict[str, Op] = {op.name: op for op in (
    ACTIVATION, EAGER_ATTENTION, FUSED_ACTIVATION, FUSED_DROPOUT_NORM, FUSED_GATED, FUSED_LORA, FUSED_RMS_NORM,
    FUSED_ROTARY, LAZY_HEAD, LEFT_TO_STOCK, LINEAR_8BIT, LORA, OUTPUT_NORM, RUN_AGAIN, WTA_CRS,
)}  # fmt: skip

__all__ = ["OPS", "Op"]
