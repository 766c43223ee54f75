"""The vendored Triton kernels, loaded when they are first needed; and where they run."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hf_memsave.device import STAND_IN, has_kernels
from hf_memsave.tape import current
from hf_memsave.tape.private import in_transform, no_modes
from hf_memsave.tape.tensors import is_plain

_NAME = "memsave_kernels"
_FOLDER = Path(__file__).parents[2] / "_vendor" / _NAME / "torch-ext" / _NAME
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


@functools.cache
def kernels() -> ModuleType:
    """The package of kernels, under the name that it has by itself.

    Returns:
        The one that is installed, if there is one; else the vendored one.

    Raises:
        ImportError: Triton is not installed.
    """
    if importlib.util.find_spec(_NAME) is not None:
        return importlib.import_module(_NAME)
    spec = importlib.util.spec_from_file_location(_NAME, _FOLDER / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules[_NAME] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules[_NAME]
        raise
    return package


def is_interpreted() -> bool:
    """Whether Triton interprets kernels, on any device and slowly, instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not(model: nn.Module) -> str:
    """Why no kernel can run on this machine, or on the device that stands in for one; or ""."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    is_there = torch.cuda.is_available() or any(p.device.type == STAND_IN for p in model.parameters())
    if not (is_there or is_interpreted()):
        return "there is no CUDA device (TRITON_INTERPRET=1, set before Python starts, interprets kernels, slowly)"
    return ""


def once(function: Any, remake: Callable[..., Tensor], *args: Any) -> Tensor:
    """``function.apply(*args)`` as one step of the tape, which sees nothing of what it consists of.

    Args:
        function: A ``torch.autograd.Function``.
        remake: Makes the same tensor again from the tensors among ``args``.
        *args: Of the function.

    Returns:
        The result.
    """
    with no_modes():
        out: Tensor = function.apply(*args)
    if (tape := current()) is not None:
        tape.record(out, remake, tuple([a for a in args if isinstance(a, Tensor)]))
    return out


def can_run(*tensors: Tensor) -> bool:
    """Whether kernels run on all of these: not under ``torch.func``'s transforms, nor on wrappers, such as DTensor."""
    if in_transform():
        return False
    with no_modes():
        return all((has_kernels(x) or is_interpreted()) and x.dtype in _DTYPES and is_plain(x) for x in tensors)
