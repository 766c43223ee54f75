r"""``cross_entropy``: one kernel that computes each row's loss of a chunk of logits and writes its gradient over them.

With p = softmax(z), e the target's one-hot row, and c what the sum of losses is divided by::

    loss_i = -log p_t          dz_i = (p - e) / c

Bytes moved, of V logits a row in a dtype of b bytes::

    torch      z in fp32, its maximum, p, 1/c, rounded: 33 V in bf16
    here       3 b V, of which b V a second time

Class weights, label smoothing, fp64 and logits that backward needs are left to PyTorch's functions.
Source: Hsu et al. (2024), arXiv:2410.10989.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_memsave.device import has_numbers
from hf_memsave.ops.fused.kernels import can_run, kernels
from hf_memsave.tape.private import to_copy

#: Ops that return a new tensor and do not keep it for backward.
_KEEPS_NOTHING = {to_copy, torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor}


def suits(node: Any, z: Tensor) -> bool:
    """Return whether logits ``z``, the values of ``node``, may be overwritten, and the kernel knows their dtype."""
    is_own = not node.args or getattr(node.func, "func", node.func) in _KEEPS_NOTHING
    return is_own and z.is_contiguous() and can_run(z)


def loss_and_gradient(z: Tensor, target: Tensor, ignored: int, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp32 losses ``[T]`` of logits ``[T, V]``, and the gradient of their sum over ``count``, written over z.

    Both are zero in rows whose class is ``ignored``. A target that is no class raises; on CUDA, as in stock, a kernel.
    """
    if has_numbers(z):  # the kernel would take such a target for one that is ignored
        index = target.where(target != ignored, 0).unsqueeze(-1)
        torch.zeros((), device=z.device).expand(z.shape).gather(-1, index)
    return kernels().cross_entropy_forward_(z, target, count, ignored), z
