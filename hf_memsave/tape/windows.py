"""The windows of a max pool: an index into the input takes 8 bytes, its place in the window mostly one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_memsave.tape.tensors import with_stride


class Windows:
    """The windows of a max pool: between an index into the input's last dimensions, and a place in its window."""

    def __init__(
        self,
        sizes: Sequence[int],
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
    ) -> None:
        self.dimensions = list(zip(sizes, kernel, stride, padding, dilation, strict=True))
        window = math.prod(kernel)  # whose elements the smallest integers tell apart
        self.dtype = torch.uint8 if window <= 2**8 else torch.int16 if window <= 2**15 else torch.int32

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
