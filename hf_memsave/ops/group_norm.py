r"""``group_norm``: ``nn.GroupNorm``.

Forward (``[N, C, *]``; mean and variance over each group of channels of each sample)::

    y = (x - mean(x)) / sqrt(var(x) + eps) * w + b

Kept for backward::

    eager    x, mean and 1/std, and y in the next convolution
    here     x, mean and 1/std                         (y is promised)

The gradients of x and w read x, so a frozen weight frees nothing. Exact: PyTorch's own op and its own backward.
Source: Wu & He (2018), arXiv:1803.08494.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_memsave.ops.cast import autocast_fp32
from hf_memsave.ops.layer_norm import promise_norm
from hf_memsave.ops.op import Binding, KeptBytes, Op


def kept_bytes(shape: tuple[int, ...], groups: int, itemsize: int) -> KeptBytes:
    """With a convolution after it that wants y; on CPU, where mean and 1/std have x's dtype."""
    n, statistics = torch.Size(shape).numel() * itemsize, 2 * shape[0] * groups * itemsize
    return KeptBytes(2 * n + statistics, n + statistics)


def _group_norm(module: nn.GroupNorm, binding: Binding, input: Tensor) -> Tensor:
    x = autocast_fp32(input)
    recompute = partial(_group_norm_of, groups=module.num_groups, eps=module.eps)
    return promise_norm(binding.stock.forward(module, x), recompute, x, module.weight, module.bias)


def _group_norm_of(x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float) -> Tensor:
    return F.group_norm(x, groups, weight, bias, eps)


def _note(module: nn.Module, binding: Binding) -> str:
    return "recomputed from its input: norm='output' is for LayerNorm and RMSNorm" if binding.value == "output" else ""


GROUP_NORM = Op("group_norm", "norm", _group_norm, note=_note)
