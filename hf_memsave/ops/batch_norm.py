r"""``batch_norm``: ``nn.BatchNorm1d`` to ``3d``, in train and in eval.

Forward (``[N, C, *]``) and, for an incoming gradient dy, backward, with m and v those of the batch (train) or the
running ones (eval: constants)::

    x̂ = (x - m) / sqrt(v + eps)     y = x̂ w + b
    dw = Σ dy x̂                     db = Σ dy
    dx = dy w / sqrt(v + eps)        eval
         … and x̂, mean(dy), mean(dy x̂)   train

Kept for backward, each as large as x::

    eager                                x, and y in the next convolution
    here    train, or w wants a gradient  x            (y is promised)
            eval, w frozen                y in the next convolution, if that wants it

Exact: stock's own operation and backward; running statistics and ``num_batches_tracked`` are stock's. To promise y, w
and b (in eval the running statistics, too) are copied: C numbers each. Sources: Bhatia & Dangel (2024), 2.2.1;
Ioffe & Szegedy (2015), arXiv:1502.03167.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_memsave.ops.layer_norm import promise_norm
from hf_memsave.ops.op import Binding, KeptBytes, Op
from hf_memsave.tape import Blank, coded
from hf_memsave.tape.promise import Keep


def kept_bytes(shape: tuple[int, ...], itemsize: int, training: bool, frozen: bool) -> KeptBytes:
    """With a convolution after it that wants y; in train also the batch's mean and 1/std."""
    n, channels = torch.Size(shape).numel() * itemsize, shape[1] * itemsize
    vectors = 2 * channels if training else 0
    return KeptBytes(2 * n + vectors, n + vectors)


def _batch_norm(module: nn.Module, binding: Binding, input: Tensor) -> Tensor:
    uses_batch = module.training or module.running_mean is None
    weight_wants = module.weight is not None and module.weight.requires_grad
    reads_input = weight_wants or (uses_batch and input.requires_grad)
    with coded(partial(_code, reads_input=reads_input, shape=input.shape)):
        y = binding.stock.forward(module, input)
    if not reads_input:
        return y
    recompute = partial(_batch_norm_of, training=uses_batch, eps=module.eps)
    statistics = (None, None) if uses_batch else (module.running_mean, module.running_var)
    return promise_norm(y, recompute, input, *statistics, module.weight, module.bias)


def _batch_norm_of(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    eps: float,
) -> Tensor:
    return F.batch_norm(x, mean, var, weight, bias, training, 0.0, eps)


def _code(tensor: Tensor, keep: Keep, reads_input: bool, shape: torch.Size) -> Blank | None:
    return None if reads_input or tensor.shape != shape else Blank(tensor)


BATCH_NORM = Op("batch_norm", "frozen", _batch_norm)
