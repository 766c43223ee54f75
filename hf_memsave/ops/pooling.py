r"""``pooling``: ``nn.MaxPool``, ``nn.AvgPool`` and ``nn.AdaptiveAvgPool``, 1d to 3d.

Forward, over the windows of x, and, for an incoming gradient dy, backward::

    average    y = mean(window)         dx = each window's dy / its size
    maximum    y = x[i]                 dx[i] += dy          i = argmax(window)

Kept for backward, with n inputs and o outputs::

    eager    x, for its shape; and i in int64, 8 o bytes (maximum)
    here     i as its place in the window: o bytes where that has at most 256 elements

Exact: stock's own operation and backward, see :mod:`~hf_memsave.tape.coding`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from hf_memsave.ops.op import Binding, KeptBytes, Op
from hf_memsave.tape import Blank, Coded, coded
from hf_memsave.tape.promise import Keep, with_stride


def kept_bytes(inputs: int, itemsize: int, outputs: int = 0, window: int = 1) -> KeptBytes:
    """For a pool of ``inputs`` elements; of a maximum, the ``outputs`` and the elements of a window."""
    return KeptBytes(inputs * itemsize + 8 * outputs, _code_dtype(window).itemsize * outputs)


def _average(module: nn.Module, binding: Binding, input: Tensor) -> Tensor:
    with coded(lambda tensor, keep: Blank(tensor)):
        return binding.stock.forward(module, input)


def _maximum(module: nn.Module, binding: Binding, input: Tensor) -> Tensor:
    windows = Windows.of(module, input)
    with coded(partial(_code, windows=windows)):
        return binding.stock.forward(module, input)


def _code(tensor: Tensor, keep: Keep, windows: Windows) -> Blank | Coded:
    if tensor.is_floating_point():
        return Blank(tensor)
    return Coded(windows.places(tensor), partial(windows.indices, stride=tensor.stride()), keep)


class Windows:
    """The windows of a max pool: between an index into the input's last dimensions, and a place in its window.

    Args:
        sizes: Of the input's pooled dimensions.
        kernel: Elements of a window, in each of them.
        stride: Between windows.
        padding: Before the first element.
        dilation: Between the elements of a window.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
    ) -> None:
        self.dimensions = list(zip(sizes, kernel, stride, padding, dilation, strict=True))
        self.dtype = _code_dtype(math.prod(kernel))

    @classmethod
    def of(cls, module: nn.Module, input: Tensor) -> Windows:
        """Those of ``module`` over ``input``."""
        rank = int(type(module).__name__[-2])
        options = (module.kernel_size, module.stride, module.padding, module.dilation)
        return cls(input.shape[-rank:], *((o,) * rank if isinstance(o, int) else o for o in options))

    def places(self, indices: Tensor) -> Tensor:
        """``indices`` ``[*, *windows]`` as places in each window, counted like the indices; exact."""
        places, count, rest = torch.zeros_like(indices), 1, indices
        for size, kernel, dilation, start in self._from_last(indices):
            places += (rest % size - start) // dilation * count
            rest, count = rest // size, count * kernel
        return places.to(self.dtype)

    def indices(self, places: Tensor, stride: tuple[int, ...]) -> Tensor:
        """The int64 indices that have these places, laid out in memory as ``stride`` says."""
        rest, count = places.to(torch.int64), 1
        indices = torch.zeros_like(rest)
        for size, kernel, dilation, start in self._from_last(places):
            indices += (rest % kernel * dilation + start) * count
            rest, count = rest // kernel, count * size
        return with_stride(indices, stride)

    def _from_last(self, pooled: Tensor) -> Iterator[tuple[int, int, int, Tensor]]:
        """Of each pooled dimension, the last one first: size, kernel, dilation, and where each window starts."""
        for before, (size, kernel, stride, padding, dilation) in enumerate(reversed(self.dimensions)):
            start = torch.arange(pooled.shape[-1 - before], device=pooled.device) * stride - padding
            yield size, kernel, dilation, start.view(-1, *[1] * before)


def _code_dtype(window: int) -> torch.dtype:
    """The smallest integers that tell the elements of a window apart."""
    return torch.uint8 if window <= 2**8 else torch.int16 if window <= 2**15 else torch.int32


def _check(module: nn.Module, names: Mapping[str, str]) -> str | None:
    return "it returns its indices (return_indices=True), so they are kept anyway" if module.return_indices else None


AVERAGE_POOL = Op("average_pool", "frozen", _average)
MAX_POOL = Op("max_pool", "frozen", _maximum, _check)
