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
#: By specialization: what gives a stream, what launches a kernel there, and its handle and metadata.
_compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}
#: Without asking whether CUDA is initialized, where there is a tensor already.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_processors: dict[int, int] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any], num_warps: int = 4
) -> None:
    """Runs ``kernel`` on a grid.

    Args:
        kernel: A ``triton.jit`` function.
        grid: Its programs along one, two or three axes; without one, nothing is run.
        args: Its arguments up to the first constant, in order, None for a tensor that is not there: one of the first
            two is one.
        constants: Its constants, in order.
        num_warps: Of each program.

    """
    if 0 in grid:
        return
    first = args[0] if args[0] is not None else args[1]
    if not isinstance(kernel, JITFunction) or not first.is_cuda:
        return launch_elsewhere(kernel, grid, args, constants, num_warps)
    device = first.get_device()
    if device != _current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, args, constants, num_warps)
    key = [id(kernel), device, num_warps, *constants.values()]  # and what Triton specializes a kernel to
    for arg in args:
        if isinstance(arg, Tensor):
            key.append(arg.dtype if arg.data_ptr() % 16 == 0 else (arg.dtype,))
        elif type(arg) is int:
            key.append((arg == 1) + 2 * (arg % 16 == 0) + 4 * (-(2**31) <= arg < 2**31))
        else:
            key.append(type(arg))
    if (ready := _compiled.get(tuple(key))) is None:
        compiled = kernel[grid](*args, **constants, num_warps=num_warps)
        stream = triton.runtime.driver.active.get_current_stream
        _compiled[tuple(key)] = stream, compiled.run, compiled.function, compiled.packed_metadata
    else:
        stream, run, function, metadata = ready  # as `compiled[grid]` calls it, but without a search for hooks
        x, y, z = (*grid, 1, 1)[:3]
        run(x, y, z, stream(device), function, metadata, None, None, None, *args, *constants.values())


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


def workers(x: Tensor, tiles: int, warps: int, registers: int) -> int:
    """How many programs share the tiles of a kernel where each has a sum of its own.

    Args:
        x: A tensor on their device.
        tiles: What they share.
        warps: Of a program.
        registers: Of a thread, at most: they say how many programs a processor runs at once.

    Returns:
        As many as run at once, or fewer that take no longer.
    """
    at_once = max(1, min(65536 // (registers * 32), 64) // warps) * processors(x)
    return ceil_div(tiles, max(1, ceil_div(tiles, at_once)))


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
def row_tile(columns: int, share: int = 16, most: int = 65536) -> tuple[int, int, int]:
    """How a program takes whole rows, or parts of long ones.

    Args:
        columns: Elements of a row.
        share: Elements of each thread, unless a row needs more than 16 warps: fewer for kernels that hold more arrays.
        most: Columns of a tile.

    Returns:
        The rows and columns of a tile, each a power of two, and the warps.

    Raises:
        ValueError: A row is too long to be held by one program.
    """
    if columns > 65536:
        raise ValueError(f"expected rows of at most 65536 elements, got {columns}: use PyTorch's own function there")
    width = min(most, max(16, triton.next_power_of_2(columns)))
    rows = max(1, min(128 * share // width, 64))
    return rows, width, max(4, min(16, rows * width // (32 * share)))
