"""Triton's interpreter: bfloat16 rounded as a GPU rounds it, and every load and store watched.

The interpreter truncates float32 to bfloat16; :func:`round_to_nearest` replaces that. :class:`Watch` counts the bytes
that each launch reads and writes, refuses an address outside the launch's own tensors, and can spoil one store.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from memsave_kernels import _launch

#: Of a test that watches kernels.
only_interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="only the interpreter can be watched")

_cast = InterpreterBuilder.cast_impl


def _rounded(self: Any, src: Any, dst_type: Any) -> Any:
    if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
        data = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16().view(torch.uint16).numpy()
        return TensorHandle(data, dst_type.scalar)
    return _cast(self, src, dst_type)


def round_to_nearest() -> None:
    """Makes the interpreter round float32 to the nearest bfloat16, ties to even."""
    InterpreterBuilder.cast_impl = _rounded


class Launch:
    """What one launch did: bytes read and written, by the name of the kernel's parameter."""

    def __init__(self, kernel: Any, args: tuple[Any, ...]) -> None:
        self.kernel = kernel.fn.__name__
        names = list(kernel.arg_names)
        self.tensors = {n: a for n, a in zip(names, args, strict=False) if isinstance(a, torch.Tensor)}
        self.ranges = {n: (a.data_ptr(), a.data_ptr() + _span(a)) for n, a in self.tensors.items()}
        self.read = dict.fromkeys(self.tensors, 0)
        self.written = dict.fromkeys(self.tensors, 0)

    def owner(self, addresses: Any, itemsize: int) -> str:
        """The parameter whose tensor all the addresses lie in."""
        low, high = int(addresses.min()), int(addresses.max()) + itemsize
        for name, (start, end) in self.ranges.items():
            if start <= low and high <= end:
                return name
        raise IndexError(f"{self.kernel} goes outside of its tensors: [{low:#x}, {high:#x})")

    def bytes_of_matrices(self, numel: int) -> int:
        """Read and written, of the tensors with ``numel`` elements or more: the others stay in the cache."""
        return sum(self.read[n] + self.written[n] for n, a in self.tensors.items() if a.numel() >= numel)


def _span(a: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(a.shape, a.stride(), strict=True))
    return (last + 1) * a.itemsize if a.numel() else 0


class Watch:
    """Every launch while it is entered. ``spoil`` is a (kernel, parameter) whose stores get a relative error of 1%."""

    def __init__(self, spoil: tuple[str, str] | None = None) -> None:
        self.launches: list[Launch] = []
        self.spoil = spoil

    def load(self, ptrs: Any, mask: Any) -> None:
        if (addresses := ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]).size:
            one, itemsize = self.launches[-1], ptrs.get_element_ty().primitive_bitwidth // 8
            one.read[one.owner(addresses, itemsize)] += addresses.size * itemsize

    def store(self, ptrs: Any, value: Any, mask: Any) -> Any:
        if not (addresses := ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]).size:
            return value
        one, itemsize = self.launches[-1], ptrs.get_element_ty().primitive_bitwidth // 8
        name = one.owner(addresses, itemsize)
        one.written[name] += addresses.size * itemsize
        return _spoilt(value) if (one.kernel, name) == self.spoil else value


def _spoilt(value: Any) -> Any:
    if value.dtype.scalar.is_int():
        return TensorHandle(value.data ^ 1, value.dtype)
    if value.dtype.scalar == tl.bfloat16:
        data = torch.from_numpy(np.ascontiguousarray(value.data)).view(torch.bfloat16)
        return TensorHandle((data * 1.01).view(torch.uint16).numpy(), value.dtype)
    return TensorHandle((value.data * 1.01).astype(value.data.dtype), value.dtype)


@contextmanager
def watching(spoil: tuple[str, str] | None = None) -> Iterator[Watch]:
    """Watches the interpreter."""
    watch = Watch(spoil)
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    run = _launch.launch_elsewhere

    def watched_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        watch.load(ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def watched_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(self, ptrs, watch.store(ptrs, value, mask), mask, *rest)

    def watched_run(kernel: Any, grid: Any, args: Any, constants: Any, num_warps: int) -> None:
        watch.launches.append(Launch(kernel, args))
        run(kernel, grid, args, constants, num_warps)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = watched_load, watched_store
    _launch.launch_elsewhere = watched_run
    try:
        yield watch
    finally:
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
        _launch.launch_elsewhere = run
