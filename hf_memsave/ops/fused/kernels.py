"""The vendored Triton kernels, loaded when first needed, and tests of whether they run."""

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

from hf_memsave.device import STAND_IN, has_kernels, has_numbers, is_capturing
from hf_memsave.ops.op import once_differentiable
from hf_memsave.tape import current
from hf_memsave.tape.private import in_transform, no_modes
from hf_memsave.tape.tensors import is_plain

_NAME = "memsave_kernels"
_FOLDER = Path(__file__).parents[2] / "_vendor" / _NAME / "torch-ext" / _NAME
#: Name of an activation -> that of its kernel.
ACTIVATIONS = {name: name for name in ("gelu", "gelu_tanh", "silu", "quick_gelu")} | {"new_gelu": "gelu_tanh"}
#: Elements of a row that a program of a norm's kernel can hold.
LONGEST_ROW = 65536
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


@functools.cache
def is_installed() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def kernels() -> ModuleType:
    """Load the vendored package, under another name if its own is taken; raise ImportError without Triton."""
    name = f"hf_{_NAME}" if importlib.util.find_spec(_NAME) is not None else _NAME
    spec = importlib.util.spec_from_file_location(name, _FOLDER / "__init__.py")
    assert spec is not None and spec.loader is not None
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules[name]
        raise
    return package


def is_interpreted() -> bool:
    """Return whether Triton interprets kernels, on any device and slowly, instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not(model: nn.Module) -> str:
    """Return why no kernel can run on this machine, or on the stand-in device of ``model``; or ""."""
    if not is_installed():
        return "Triton is not installed: pip install triton"
    is_there = torch.cuda.is_available() or any(p.device.type == STAND_IN for p in model.parameters())
    if not (is_there or is_interpreted()):
        return "there is no CUDA device (TRITON_INTERPRET=1, set before Python starts, interprets kernels, slowly)"
    return ""


def fused(run: Callable[..., Any], back: Callable[..., Any], *tensors: Tensor, kept: slice = slice(None)) -> Tensor:
    """Return ``run(*tensors)``, differentiable once, as one call that the tape can run again.

    ``run`` returns the result, or a tuple of it and of tensors to keep for backward, beside those ``kept`` of its own.
    ``back`` is called with flags of the gradients wanted, the incoming gradient and the kept tensors; it returns
    gradients of the first tensors, and maybe more.
    """
    with no_modes():
        out: Tensor = _Fused.apply(run, back, kept, *tensors)
        if (tape := current()) is not None:
            tape.record(out, functools.partial(_first, run), tensors)
    return out


def _first(run: Callable[..., Any], *tensors: Tensor) -> Any:
    found = run(*tensors)
    return found[0] if isinstance(found, tuple) else found


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], back: Callable[..., Any], kept: slice, *tensors: Tensor) -> Tensor:
        found = run(*tensors)
        out, *others = found if isinstance(found, tuple) else (found,)
        ctx.save_for_backward(*tensors[kept], *others)
        ctx.set_materialize_grads(False)
        ctx.back = back
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        wanted = ctx.needs_input_grad[3:]
        found = (*ctx.back(wanted, dy, *ctx.saved_tensors), *[None] * len(wanted))
        return None, None, None, *found[: len(wanted)]


def can_run(*tensors: Tensor) -> bool:
    """Return whether kernels run on tensors: not under ``torch.func``'s transforms, nor on wrappers such as DTensor."""
    return runs_on(*tensors) and all(x.dtype in _DTYPES for x in tensors)


def runs_on(*tensors: Tensor) -> bool:
    """Return what :func:`can_run` does, for tensors of any dtype, such as masks."""
    if not is_installed() or in_transform():
        return False
    with no_modes():
        return all((has_kernels(x) or is_interpreted()) and is_plain(x) for x in tensors)


def is_watched(module: nn.Module) -> bool:
    """Return whether calling ``module`` runs more than its class's forward: hooks, or a forward set on the instance."""
    own = module.__dict__
    hooks = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    return bool(hooks) or "forward" in own


def draws_as_stock(x: Tensor, patch: Any) -> bool:
    """Return whether the dropout of ``x`` is left to stock: a CUDA graph would draw the same masks in each run."""
    # A module's value says whether masks may be others; a tape cannot: a checkpoint's first forward may have none.
    return not patch.value or is_capturing(x.device)


def seed_for(x: Tensor, generator: torch.Generator | None = None) -> int:
    """Draw a seed from ``generator``, by default the one of the device of ``x``; 0 where ``x`` has no numbers."""
    return kernels().draw_seed(x.device, generator) if has_numbers(x) else 0
