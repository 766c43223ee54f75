r"""``cross_entropy``: of a chunk of logits, each row's loss and its gradient, which takes their place, by one kernel.

With p = softmax(z), e the target's one-hot row, and c what the sum of losses is divided by::

    loss_i = -log p_t          dz_i = (p - e) / c

Bytes moved, of V logits a row in a dtype of b bytes::

    torch      z in fp32, its maximum, p, 1/c, rounded: 33 V in bf16
    here       3 b V, of which b V a second time

Computed in fp32 and rounded once, as by PyTorch's functions. Class weights, label smoothing and fp64 are left to those,
and so are logits that backward needs. Source: Hsu et al. (2024), arXiv:2410.10989.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_memsave.device import has_numbers
from hf_memsave.ops.fused.kernels import can_run, kernels

#: Conversions, which may give back what they are given; and what keeps its own result.
_CONVERTS = frozenset(
    {torch.Tensor.float, torch.Tensor.to, torch.Tensor.bfloat16, torch.Tensor.half, torch.Tensor.type}
)
_KEEPS = frozenset({torch.tanh, torch.Tensor.tanh})


def suits(steps: Any, z: Tensor) -> bool:
    """Whether logits ``z`` may be written over, after these steps from a product, and the kernel knows their dtype."""
    last: Callable[..., Any] | None = next((func for func, *_ in reversed(steps) if func not in _CONVERTS), None)
    return last not in _KEEPS and z.is_contiguous() and can_run(z)


def loss_and_gradient(z: Tensor, target: Tensor, ignored: int, count: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's loss, and the gradient of their sum over ``count``, in the place of ``z``.

    Args:
        z: Logits ``[T, V]``; overwritten.
        target: Classes ``[T]``.
        ignored: The class of rows that count for nothing.
        count: fp32, of one element.

    Returns:
        Losses ``[T]``, fp32, not divided; and the gradient.

    Raises:
        RuntimeError: On CUDA and from its kernels, as in stock, a target is no class.
    """
    if has_numbers(z):  # the kernel would take such a target for one that is ignored
        index = target.where(target != ignored, 0).unsqueeze(-1)
        torch.zeros((), device=z.device).expand(z.shape).gather(-1, index)
    return kernels().cross_entropy_forward_(z, target, count, ignored), z
