"""Every private or experimental name of PyTorch that the stand-in device needs; one test names them all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hf_memsave.device import STAND_IN
from hf_memsave.errors import MeasureError

#: What was looked for in vain, in the versions of PyTorch that have not all of it.
MISSING = (
    "the stand-in for a CUDA device needs PyTorch 2.11 or later, got {version}: {error}. Run: pip install -U torch"
)


def register_device(module: Any, is_on: Callable[[], bool]) -> None:
    """Make the device named :data:`~hf_memsave.device.STAND_IN` known. Once per process.

    Args:
        module: What ``torch.cuda`` is for CUDA.
        is_on: Whether the device is there now: PyTorch takes it for the machine's accelerator, and would pin memory
            for it.

    Raises:
        MeasureError: Another library has taken the place, or PyTorch is too old.
    """
    try:
        taken = torch._C._get_privateuse1_backend_name()
        hooks, guard = _hooks(is_on), _guard()
    except (AttributeError, RuntimeError) as error:
        raise MeasureError(MISSING.format(version=torch.__version__, error=error)) from error
    if taken != "privateuseone":
        raise MeasureError(
            f"the stand-in for a CUDA device needs PyTorch's place for one more backend, which {taken!r} has taken. "
            "Run the estimate in a process that does not import that library."
        )
    torch.utils.rename_privateuse1_backend(STAND_IN)  # type: ignore[attr-defined]
    torch._register_device_module(STAND_IN, module)
    torch._C._acc.register_python_privateuseone_hook(hooks)
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    _held.extend((hooks, guard))


def _hooks(is_on: Callable[[], bool]) -> Any:
    class Hooks(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return is_on()

        def has_primary_context(self, index: int) -> bool:
            return is_on()

        def is_built(self) -> bool:
            return True

    return Hooks()


def _guard() -> Any:
    class Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.PrivateUse1

    return Guard()


#: What PyTorch is given and does not hold.
_held: list[Any] = []


def fake_tensors() -> contextlib.AbstractContextManager[Any]:
    """A mode in which tensors have shapes, and no numbers; single ones on the CPU have theirs."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Mode(FakeTensorMode):
        def may_turn_const(self, tensor: torch.Tensor) -> bool:
            return tensor.device.type == "cpu" and super().may_turn_const(tensor)

    return Mode(allow_non_fake_inputs=True)


def quick_device(tensor: torch.Tensor) -> torch.device:
    """``tensor.device``; of a fake tensor without the dispatcher, where each such question takes as long as an op."""
    device: torch.device = getattr(tensor, "fake_device", None) or tensor.device
    return device


def library(namespace: str) -> Any:
    """Where functions of the stand-in device are registered; for the life of the process."""
    _held.append(made := torch.library.Library(namespace, "IMPL"))
    return made


def register_constants() -> None:
    """Let ``torch.tensor(1.0, device=...)`` be made: fake tensors hold constants as tensors that are not fake."""
    lib = library("aten")
    lib.impl("empty_strided", lambda size, stride, *, dtype, **_: _empty(size, dtype), "PrivateUse1")
    lib.impl("_copy_from", lambda source, target, non_blocking=False: target, "PrivateUse1")


def _empty(size: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch._C._acc.create_empty_tensor(size, dtype)  # type: ignore[arg-type]  # takes lists too


def without_autocast() -> Any:
    """A context in which the dispatcher passes autocast by."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
    return torch._C._ExcludeDispatchKeyGuard(keys)


def overloads(name: str) -> Iterator[Callable[..., Any]]:
    """Those of ``aten::name`` that make a new tensor."""
    packet = getattr(torch.ops.aten, name, None)
    for overload in packet.overloads() if packet is not None else ():
        func = getattr(packet, overload)
        if not func._schema.is_mutable and any(a.type.kind() == "TensorType" for a in func._schema.arguments):
            yield func
