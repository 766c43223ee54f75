"""Kernels that give the same bits each time: what equality to the bit can be asked under, on CUDA too."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_memsave.errors import MeasureError

#: Read by cuBLAS once in a process, and the values under which its sums have a fixed order.
_VARIABLE, _VALUES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")


@contextlib.contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Inside, PyTorch takes deterministic algorithms alone, and attention is a product of matrices.

    The backwards of the flash, efficient and cuDNN attention add in no fixed order. At the end, or on an error, every
    setting is as it was.

    Raises:
        MeasureError: cuBLAS may have begun in this process, without a fixed order.
    """
    with contextlib.ExitStack() as stack:
        if os.environ.get(_VARIABLE) not in _VALUES:
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                raise MeasureError(
                    f"deterministic kernels: expected {_VARIABLE}={_VALUES[0]} before CUDA is used, got "
                    f"{os.environ.get(_VARIABLE)!r}. Set it in the environment that starts the process."
                )
            stack.callback(_set, _VARIABLE, os.environ.get(_VARIABLE))
            os.environ[_VARIABLE] = _VALUES[0]
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        stack.callback(
            torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled(), warn_only=warns
        )
        torch.use_deterministic_algorithms(True)
        stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
        torch.backends.cudnn.benchmark = False  # else it picks by time, and not the same each time
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
