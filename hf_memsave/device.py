"""The behaviour of devices: as CPU, or as CUDA. Code that needs to know asks here, and not for a device's name."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

#: The type of a device that behaves as CUDA on any machine: it is not there, and its tensors have no values.
STAND_IN = "fakegpu"
_AS_CUDA = frozenset({"cuda", STAND_IN})
#: The dtypes of 16 bits.
HALVES = (torch.float16, torch.bfloat16)


def fuses_dropout(x: Tensor) -> bool:
    """Return whether ``F.dropout`` of ``x`` is one kernel, which keeps a boolean mask; else it multiplies by noise."""
    return x.device.type in _AS_CUDA


def is_autocast(x: Tensor) -> bool:
    """Return whether autocast is on for the device of ``x``."""
    return torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)


def has_kernels(x: Tensor) -> bool:
    """Return whether Triton, where it is installed, compiles kernels for the device of ``x``."""
    return x.device.type in _AS_CUDA


def has_wide_products(x: Tensor) -> bool:
    """Return whether a product of tensors like ``x``, bf16 or fp16, can be fp32: ``torch.mm(..., out_dtype=)``."""
    return x.device.type == STAND_IN or (x.device.type in _AS_CUDA and _gives_wide_products(x.device, x.dtype))


@functools.cache
def _gives_wide_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Try once whether ``torch.mm`` takes ``out_dtype``: not every build for AMD's devices does."""
    x = torch.zeros(16, 16, device=device, dtype=dtype)
    try:
        return torch.mm(x, x, out_dtype=torch.float32).dtype == torch.float32
    except (TypeError, RuntimeError):
        return False


#: Device and dtype -> the result of :func:`adds_wide_products`.
_adds: dict[tuple[torch.device, torch.dtype], bool] = {}


def adds_wide_products(x: Tensor) -> bool:
    """Return whether such a product can be added to an fp32 tensor: ``torch.addmm(..., out_dtype=, out=)``."""
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
    """Return ``a @ b`` of ``[M, K]`` and ``[K, N]`` of one dtype, in ``dtype``, that or a wider one; rounded once."""
    if a.dtype == dtype:
        return a @ b
    if dtype == torch.float32 and has_wide_products(a):
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add ``a @ b`` of ``[M, K]`` and ``[K, N]``, bf16 or fp16, to fp32 ``total`` in place, in one kernel if it can."""
    if adds_wide_products(a):
        return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    return total.add_(wide_product(a, b, total.dtype))


def has_numbers(x: Tensor) -> bool:
    """Return whether a program may ask for the values of ``x``; on CUDA it waits for them."""
    return x.device.type not in ("meta", STAND_IN)


def memory_of(x: Tensor) -> int | None:
    """Return the bytes of memory of the device of ``x``; None for main memory, and for the stand-in."""
    return torch.cuda.get_device_properties(x.device).total_memory if x.device.type == "cuda" else None


def free_main_memory() -> int:
    """Return the free bytes of main memory that control groups allow beside this process's own."""
    free: int = psutil.virtual_memory().available
    taken: int = psutil.Process().memory_info().rss
    return min(free, *(limit - taken for limit in _limits()))


@functools.cache
def _limits() -> list[int]:
    """Return the bytes of main memory in all, and those that each control group of this process may take."""
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
    """Return whether a program that asks for the values of ``x`` waits for what is queued on its device."""
    return x.device.type not in ("cpu", "meta")


def later(x: Tensor) -> Callable[[], Tensor]:
    """Copy ``x`` to the CPU in the background; return a function that waits for it, hardly at all a step later."""
    copy = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
    event = torch.cuda.Event()
    event.record(current_stream(x.device))

    def get() -> Tensor:
        event.synchronize()
        return copy

    return get


class Questions:
    """Requests for values on a device: answered one step later where the host would wait, elsewhere at once."""

    def __init__(self) -> None:
        self._open: list[tuple[Callable[[], Tensor], Callable[[Tensor], None]]] = []

    def ask(self, x: Tensor, tell: Callable[[Tensor], None]) -> None:
        """Have ``tell`` called with ``x`` on the CPU: now, or in :meth:`hear`."""
        if tells_later(x):
            self._open.append((later(x), tell))
        else:
            tell(x.cpu())

    def hear(self) -> None:
        """Answer the requests made until now. Called once a step, before the requests of that step."""
        asked, self._open = self._open, []
        for get, tell in asked:
            tell(get())


def tells_later(x: Tensor) -> bool:
    """Return whether the host would wait for a value of ``x``, and can have it copied while it goes on instead."""
    return x.device.type in _AS_CUDA


def fills_finite(x: Tensor) -> bool:
    """Return whether PyTorch gives cuDNN's attention -65504, not -inf, for False in a mask like ``x``: before 2.12."""
    return x.device.type in _AS_CUDA and torch.__version__ < "2.12"


def mask_multiple(x: Tensor) -> int:
    """Return what an attention mask's row length must be a multiple of, or each layer's kernel copies the mask."""
    return 8 if x.device.type in _AS_CUDA else 1


def is_aligned(x: Tensor) -> bool:
    """Return whether ``x`` begins where a kernel's widest loads may begin, as a fresh tensor does."""
    nbytes = 16 if torch.version.hip is None else 16 * x.itemsize  # AMD's devices take up to 16 elements at once
    if x.device.type == STAND_IN:  # it has no addresses, and its storages begin where an allocator's would
        return x.storage_offset() * x.itemsize % nbytes == 0
    return x.data_ptr() % nbytes == 0


def default_generator(device: torch.device) -> Any:
    """Return the random generator that kernels of ``device`` draw from by default."""
    if device.type not in _AS_CUDA:
        return torch.default_generator
    module = torch.get_device_module(device)
    return module.default_generators[module.current_device() if device.index is None else device.index]


def new_generator(device: torch.device, seed: int) -> torch.Generator:
    """Return a new random generator with this seed for draws on ``device``."""
    return torch.Generator("cpu" if device.type == STAND_IN else device).manual_seed(seed)


def is_capturing(device: torch.device) -> bool:
    """Return whether ops now go into a CUDA graph, to be replayed with other random numbers."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def has_streams(device: torch.device) -> bool:
    """Return whether work on ``device`` is queued, on streams that can wait for each other."""
    return device.type == "cuda"


def current_stream(device: torch.device) -> Any:
    """Return the current stream of ``device``; None where everything runs in order."""
    return torch.cuda.current_stream(device) if has_streams(device) else None
