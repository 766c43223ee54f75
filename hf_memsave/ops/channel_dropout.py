r"""``channel_dropout``: ``nn.Dropout1d`` to ``3d``, which drop whole channels.

Forward (``[N, C, *]``), with q = 1 - p, and backward::

    y = x * m / q       m ~ Bernoulli(q), ``[N, C, 1, …]``, from the model's own generator
    dx = dy * m / q

Kept for backward::

    eager    m / q, and y in the next convolution; x where somebody else keeps that
    here     m / q, and x where somebody wants y       (y is promised)

Exact: the same masks in the same order. Source: Tompson et al. (2015), arXiv:1411.4280.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hf_memsave.ops.op import Binding, KeptBytes, Op
from hf_memsave.tape import promised

#: Dimensions of an input that is one sample without a batch: stock adds the batch in between.
_UNBATCHED = {"Dropout1d": 2, "Dropout3d": 4}


def channel_dropout_reference(x: Tensor, p: float) -> Tensor:
    """The tests' ground truth."""
    return torch.feature_dropout(x, p, train=True)


def kept_bytes(shape: tuple[int, ...], itemsize: int) -> KeptBytes:
    """The dropout of ``shape`` and a trained convolution after it, where the dropout's input is kept anyway."""
    noise = shape[0] * shape[1] * itemsize
    return KeptBytes(torch.Size(shape).numel() * itemsize + noise, noise)


def channel_dropout(x: Tensor, p: float) -> Tensor:
    """``torch.feature_dropout(x, p, train=True)``, promised."""
    if not 0 < p < 1 or not x.numel():
        return torch.feature_dropout(x, p, train=True)
    noise = x.new_empty(*x.shape[:2], *[1] * (x.dim() - 2)).bernoulli_(1 - p).div_(1 - p)
    return promised(torch.mul, x, noise) if x.requires_grad else x * noise  # which keeps nothing


def _channel_dropout(module: nn.Module, binding: Binding, input: Tensor) -> Tensor:
    if not module.training or input.dim() < 3 or input.dim() == _UNBATCHED.get(type(module).__name__):
        return binding.stock.forward(module, input)
    return channel_dropout(input, module.p)


def _check(module: nn.Module, names: Mapping[str, str]) -> str | None:
    return "it works in place (inplace=True), so its input is gone" if module.inplace else None


CHANNEL_DROPOUT = Op("channel_dropout", "frozen", _channel_dropout, _check)
