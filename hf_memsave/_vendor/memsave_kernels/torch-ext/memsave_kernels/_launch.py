"""Launching a kernel: by Triton once for each specialization, and from then on the compiled kernel itself.

Triton's own launch binds and specializes the arguments in Python each time, which takes longer than many of these
kernels run. Here the key of a specialization is made of what Triton would look at, and nothing else.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_compiled: dict[tuple[Any, ...], Any] = {}
_processors: dict[int, int] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any], num_warps: int = 4
) -> None:
    """Runs ``kernel`` on a grid.

    Args:
        kernel: A ``triton.jit`` function.
        grid: Its programs along one, two or three axes; without one, nothing is run.
        args: Its arguments up to the first constant, in order; None for a tensor that is not there.
        constants: Its constants, in order.
        num_warps: Of each program.

    """
    if 0 in grid:
        return
    first = next(arg for arg in args if isinstance(arg, Tensor))
    if not isinstance(kernel, JITFunction) or not first.is_cuda:
        return launch_elsewhere(kernel, grid, args, constants, num_warps)
    if first.get_device() != torch.cuda.current_device():
        with torch.cuda.device(first.device):
            return launch(kernel, grid, args, constants, num_warps)
    key = (id(kernel), first.get_device(), num_warps, *constants.values(), *map(_specialized, args))
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*args, **constants, num_warps=num_warps)
    else:
        compiled[grid if len(grid) == 3 else (*grid, 1, 1)](*args, *constants.values())


def launch_elsewhere(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any], num_warps: int
) -> None:
    """Interprets a kernel; arguments as in :func:`launch`.

    Raises:
        RuntimeError: It is compiled for a GPU, and the tensors are not on one.
    """
    if isinstance(kernel, JITFunction):
        raise RuntimeError(
            f"{kernel.__name__} runs on a CUDA device, got tensors elsewhere. Move them to one, or set "
            "TRITON_INTERPRET=1 before the import, which interprets the kernels (slowly)."
        )
    kernel[grid](*args, **constants)


def _specialized(arg: Any) -> Any:
    """What Triton would specialize a kernel to: the rest of an argument may change without another compilation."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if isinstance(arg, Long):
        return Long
    if isinstance(arg, int):
        return arg == 1, arg % 16 == 0, -(2**31) <= arg < 2**31
    return arg is None


class Long(int):
    """A 64-bit number that no kernel is specialized to: its parameter is a ``tl.int64`` in ``do_not_specialize``."""


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name of a floating-point dtype.

    Returns:
        That of ``tl``.

    Raises:
        TypeError: There are no kernels for it.
    """
    if dtype not in _DTYPES:
        raise TypeError(f"expected float32, bfloat16 or float16, got {dtype}")
    return _DTYPES[dtype]


def workers(x: Tensor, tiles: int, warps: int) -> int:
    """How many programs share the tiles of a kernel where each has a sum of its own: two or more on every processor."""
    return min(tiles, max(2, 16 // warps) * processors(x))


def processors(x: Tensor) -> int:
    """Of a tensor's device; 1 in the interpreter."""
    if not x.is_cuda:
        return 1
    index = x.get_device()
    if index not in _processors:
        _processors[index] = torch.cuda.get_device_properties(index).multi_processor_count
    return _processors[index]


def dense(*tensors: Tensor | None) -> list[Tensor | None]:
    """Each, contiguous."""
    return [None if t is None else t.contiguous() for t in tensors]


def like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of x's shape, contiguous."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def ceil_div(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


@functools.cache
def row_tile(columns: int, share: int = 16) -> tuple[int, int, int]:
    """How a program takes whole rows.

    Args:
        columns: Elements of a row.
        share: Elements of each thread, unless a row needs more than 16 warps: fewer for kernels that hold more arrays.

    Returns:
        The rows and columns of a tile, each a power of two, and the warps.

    Raises:
        ValueError: A row is too long to be held by one program.
    """
    if columns > 65536:
        raise ValueError(f"expected rows of at most 65536 elements, got {columns}: use PyTorch's own function there")
    width = max(16, triton.next_power_of_2(columns))
    rows = max(1, min(128 * share // width, 64))
    return rows, width, max(4, min(16, rows * width // (32 * share)))
