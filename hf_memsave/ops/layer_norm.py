r"""``layer_norm``: ``nn.LayerNorm``.

Forward (``[*, H]``)::

    y = (x - mean(x)) / sqrt(var(x) + eps) * w + b

Kept for backward::

    eager    x, mean and 1/std (in x's dtype on CPU), and y in the next linear
    here     x, mean and 1/std                         (y is promised)

Exact: PyTorch's own op and its own backward, which keeps only its input. Source: Ba et al. (2016), arXiv:1607.06450.
"""

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
    x = autocast_fp32(x)
    parameters = [p for p in (weight, bias) if p is not None]
    has_weight, has_bias = weight is not None, bias is not None

    def recompute(x: Tensor, *parameters: Tensor) -> Tensor:
        w = parameters[0] if has_weight else None
        b = parameters[-1] if has_bias else None
        return F.layer_norm(x, shape, w, b, eps)

    return promise(recompute(x, *parameters), recompute, x, *parameters)


def _layer_norm(module: nn.LayerNorm, binding: Binding, input: Tensor) -> Tensor:
    return layer_norm(input, module.normalized_shape, module.weight, module.bias, module.eps)


LAYER_NORM = Op("layer_norm", "norm", _layer_norm)
