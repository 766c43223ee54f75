r"""``layer_norm``: ``nn.LayerNorm``.

Forward (``[*, H]``)::

    y = (x - mean(x)) / sqrt(var(x) + eps) * w + b

Kept for backward::

    eager    x, mean and 1/std (in x's dtype on CPU), and y in the next linear
    here     x, mean and 1/std                         (y is promised)

Exact: PyTorch's own op and its own backward, which keeps only its input. Source: Ba et al. (2016), arXiv:1607.06450.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_memsave.ops.cast import autocast_fp32
from hf_memsave.ops.op import Binding, KeptBytes, Op
from hf_memsave.tape import promise


def layer_norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The tests' ground truth."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def kept_bytes(shape: tuple[int, ...], itemsize: int) -> KeptBytes:
    """As for :func:`~hf_memsave.ops.rms_norm.kept_bytes`; on CPU, where mean and 1/std have x's dtype."""
    rows, n = torch.Size(shape[:-1]).numel(), torch.Size(shape).numel()
    return KeptBytes(2 * n * itemsize + 2 * rows * itemsize, n * itemsize + 2 * rows * itemsize)


def layer_norm(
    x: Tensor, shape: tuple[int, ...], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """``F.layer_norm`` of ``x`` ``[*, *shape]``, promised."""
    recompute = partial(_layer_norm_of, shape=shape, eps=eps)
    x = autocast_fp32(x)
    return promise_norm(recompute(x, weight, bias), recompute, x, weight, bias)


def promise_norm(y: Tensor, recompute: Callable[..., Tensor], x: Tensor, *vectors: Tensor | None) -> Tensor:
    """Promise that ``recompute(x, *vectors)`` equals ``y``.

    Not where ``x`` is not kept anyway, for want of gradients, nor where copies of the vectors would take more than y.

    Returns:
        ``y`` itself.
    """
    given = [v for v in vectors if v is not None]
    if not y.requires_grad or y.numel() <= sum(v.numel() for v in given):
        return y
    is_given = [v is not None for v in vectors]
    return promise(y, partial(_with_none, recompute, is_given), x, *given)


def _with_none(recompute: Callable[..., Tensor], is_given: list[bool], x: Tensor, *given: Tensor) -> Tensor:
    rest = iter(given)
    return recompute(x, *(next(rest) if here else None for here in is_given))


def _layer_norm_of(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...], eps: float) -> Tensor:
    return F.layer_norm(x, shape, weight, bias, eps)


def _layer_norm(module: nn.LayerNorm, binding: Binding, input: Tensor) -> Tensor:
    return layer_norm(input, module.normalized_shape, module.weight, module.bias, module.eps)


LAYER_NORM = Op("layer_norm", "norm", _layer_norm)
