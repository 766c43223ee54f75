"""What a device does: as CPU does, or as CUDA does. Code that needs to know asks here, and not for its name.

One does as CUDA does without being there: :data:`STAND_IN`, on which :mod:`hf_memsave.measure` runs a model for its
memory, and whose tensors have shapes and no numbers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

#: The name of the device that does as CUDA does on any machine.
STAND_IN = "fakegpu"
_AS_CUDA = frozenset({"cuda", STAND_IN})
#: The dtypes of 16 bits.
HALVES = (torch.float16, torch.bfloat16)


def fuses_dropout(x: Tensor) -> bool:
    """Whether ``F.dropout`` is one kernel there, which keeps a boolean mask; else it multiplies with noise."""
    return x.device.type in _AS_CUDA


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is on where ``x`` lies."""
    return torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)


def has_kernels(x: Tensor) -> bool:
    """Whether Triton, where it is installed, compiles kernels for the device of ``x``."""
    return x.device.type in _AS_CUDA


def has_wide_products(x: Tensor) -> bool:
    """Whether a product of bf16 or fp16 there can be given in fp32: ``torch.mm(..., out_dtype=)``."""
    return x.device.type == STAND_IN or (x.device.type in _AS_CUDA and _gives_wide_products(x.device, x.dtype))


@functools.cache
def _gives_wide_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Tried once: not every build for AMD's devices does."""
    x = torch.zeros(16, 16, device=device, dtype=dtype)
    try:
        return torch.mm(x, x, out_dtype=torch.float32).dtype == torch.float32
    except (TypeError, RuntimeError):
        return False


#: Device and dtype -> whether :func:`adds_wide_products` has found so.
_adds: dict[tuple[torch.device, torch.dtype], bool] = {}


def adds_wide_products(x: Tensor) -> bool:
    """Whether such a product can be added to a tensor in fp32: ``torch.addmm(..., out_dtype=, out=)``."""
    key = x.device, x.dtype
    if key not in _adds and type(x) is Tensor and not is_capturing(x.device):
        found = False
        if x.device.type in _AS_CUDA:
            a, total = x.new_ones(16, 16), x.new_ones(16, 16, dtype=torch.float32)
            with contextlib.suppress(TypeError, RuntimeError):  # with numbers: PyTorch before 2.10 had faults here
                torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
                found = bool((total == 17).all())
        _adds[key] = found  # another thread that asks meanwhile tries as well
    return _adds.get(key, x.device.type == STAND_IN)  # what cannot be tried now can be asked again


def wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a @ b`` of ``[M, K]`` and ``[K, N]`` of one dtype, in ``dtype``, that or a wider one; rounded once."""
    if a.dtype == dtype:
        return a @ b
    if dtype == torch.float32 and has_wide_products(a):
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add ``a @ b`` of ``[M, K]`` and ``[K, N]``, bf16 or fp16, to ``total``, fp32, in place by the product itself."""
    if adds_wide_products(a):
        return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    return total.add_(wide_product(a, b, total.dtype))


def has_numbers(x: Tensor) -> bool:
    """Whether a program may ask for the numbers in ``x``; on CUDA it waits for them."""
    return x.device.type not in ("meta", STAND_IN)


def memory_of(x: Tensor) -> int | None:
    """Bytes of memory that the device of ``x`` has; None for main memory, and for the stand-in, which has as many."""
    return torch.cuda.get_device_properties(x.device).total_memory if x.device.type == "cuda" else None


def free_main_memory() -> int:
    """Bytes of main memory that are free, and no more than the control groups allow beside what this process has."""
    free: int = psutil.virtual_memory().available
    taken: int = psutil.Process().memory_info().rss
    return min(free, *(limit - taken for limit in _limits()))


@functools.cache
def _limits() -> list[int]:
    """Bytes of main memory that each control group of this process may take; of no group as many as there are."""
    found: list[int] = [psutil.virtual_memory().total]
    with contextlib.suppress(OSError):  # Linux alone has control groups
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controller, path = line.split(":", 2)  # none where they are of version 2
            limit = "memory.limit_in_bytes" if controller else "memory.max"
            group = Path("/sys/fs/cgroup", controller, path[1:])
            for folder in (group, *group.parents):  # in a container the path may be that of the host
                with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                    found.append(int((folder / limit).read_text(encoding="utf-8")))
    return found


def waits(x: Tensor) -> bool:
    """Whether a program that asks for the numbers in ``x`` waits for what is queued there."""
    return x.device.type not in ("cpu", "meta")


def later(x: Tensor) -> Callable[[], Tensor]:
    """What gives ``x`` on the CPU, which is on its way there: called a step later, it waits for next to nothing."""
    copy = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
    event = torch.cuda.Event()
    event.record(current_stream(x.device))

    def get() -> Tensor:
        event.synchronize()
        return copy

    return get


class Questions:
    """What a program asks of a device's numbers: told one step later where the host would wait, elsewhere at once."""

    def __init__(self) -> None:
        self._open: list[tuple[Callable[[], Tensor], Callable[[Tensor], None]]] = []

    def ask(self, x: Tensor, tell: Callable[[Tensor], None]) -> None:
        """Have ``tell`` called with ``x`` on the CPU."""
        if tells_later(x):
            self._open.append((later(x), tell))
        else:
            tell(x.cpu())

    def hear(self) -> None:
        """Tell what has been asked until now. Called once a step, before what that asks."""
        asked, self._open = self._open, []
        for get, tell in asked:
            tell(get())


def tells_later(x: Tensor) -> bool:
    """Whether the host would wait for a number of ``x``, and can have it sent while it goes on instead."""
    return x.device.type in _AS_CUDA


def fills_finite(x: Tensor) -> bool:
    """Whether cuDNN's attention is given -65504 for False in a mask there, and not -inf: before PyTorch 2.12."""
    return x.device.type in _AS_CUDA and torch.__version__ < "2.12"


def mask_multiple(x: Tensor) -> int:
    """Of how many elements the rows of an attention mask are a multiple; other masks each layer's kernel copies."""
    return 8 if x.device.type in _AS_CUDA else 1


def is_aligned(x: Tensor) -> bool:
    """Whether the first element of ``x`` lies where a kernel's widest loads may begin, as a fresh tensor's does."""
    nbytes = 16 if torch.version.hip is None else 16 * x.itemsize  # AMD's devices take up to 16 elements at once
    if x.device.type == STAND_IN:  # it has no addresses, and its storages begin where an allocator's would
        return x.storage_offset() * x.itemsize % nbytes == 0
    return x.data_ptr() % nbytes == 0


def default_generator(device: torch.device) -> Any:
    """The generator that kernels of ``device`` draw from unless they are given one."""
    if device.type not in _AS_CUDA:
        return torch.default_generator
    module = torch.get_device_module(device)
    return module.default_generators[module.current_device() if device.index is None else device.index]


def new_generator(device: torch.device, seed: int) -> torch.Generator:
    """A generator of its own for draws on ``device``."""
    return torch.Generator("cpu" if device.type == STAND_IN else device).manual_seed(seed)


def is_capturing(device: torch.device) -> bool:
    """Whether what is called now goes into a graph of CUDA's, to run again with other random numbers."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def has_streams(device: torch.device) -> bool:
    """Whether work on ``device`` is queued, on streams that can wait for each other."""
    return device.type == "cuda"


def current_stream(device: torch.device) -> Any:
    """The stream that ``device`` works on now; None where everything is done in order."""
    return torch.cuda.current_stream(device) if has_streams(device) else None
