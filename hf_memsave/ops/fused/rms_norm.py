r"""``fused_rms_norm``: RMSNorm as one kernel each way.

Kept for backward, x ``[T, H]``::

    stock    x, x in fp32, x̂, their factors: seven operations
    here     x, and a number a row; y is recomputed by the same kernel, bit for bit

Source: Zhang and Sennrich (2019), arXiv:1910.07467.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from hf_memsave.ops.fused.kernels import can_run, fused, kernels
from hf_memsave.ops.op import Op, not_parametrized


def _rms_norm(module: nn.Module, patch: Any, x: Tensor) -> Tensor:
    weight: Any = module.weight
    if not can_run(x, weight):
        return patch.stock.forward(module, x)
    style, name_of_eps = patch.value
    run = partial(kernels().rms_norm_forward, eps=getattr(module, name_of_eps), style=style)
    return fused(run, lambda wanted, *given: kernels().rms_norm_backward(*given, style, wanted[1]), x, weight)


FUSED_RMS_NORM = Op("fused_rms_norm", _rms_norm, not_parametrized, is_implied=True, replaces_stock=True)
