"""Every private or experimental name of PyTorch that the stand-in device needs; one test names them all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hf_memsave.device import STAND_IN
from hf_memsave.tape.private import FakeTensorMode, is_registered

#: What PyTorch is given and does not hold.
_held: list[Any] = []
#: What a device written in Python needs of ``torch._C._acc``.
_NEEDED = """PrivateUse1Hooks DeviceGuard register_python_privateuseone_hook register_python_privateuseone_device_guard
create_empty_tensor""".split()


def why_not() -> str | None:
    """Why this process can have no stand-in for a CUDA device; None where it can, or has it."""
    if torch.cuda.is_available():
        return (
            "the stand-in for a CUDA device needs a process without GPUs, as PyTorch would take it for theirs until "
            "the process ends. Run it with CUDA_VISIBLE_DEVICES= in the environment; hf_memsave.estimate does so."
        )
    missing = [name for name in _NEEDED if not hasattr(getattr(torch._C, "_acc", None), name)]
    if missing:
        return (
            f"the stand-in for a CUDA device needs PyTorch 2.10 or later, got {torch.__version__} without "
            f"{missing[0]}. Run: pip install -U torch"
        )
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", STAND_IN):
        return (
            f"the stand-in for a CUDA device needs PyTorch's place for one more backend, which {taken!r} has taken. "
            "Run the estimate in a process that does not import that library."
        )
    return None


def register_device(module: Any, is_on: Callable[[], bool]) -> None:
    """Make the stand-in device known, once per process; ``is_on`` tells whether it is there."""

    class Hooks(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:  # else PyTorch takes it for the machine's accelerator, and pins memory for it
            return is_on()

        def has_primary_context(self, index: int) -> bool:
            return is_on()

        def is_built(self) -> bool:
            return True

    class Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.PrivateUse1

    hooks, guard = Hooks(), Guard()
    torch.utils.rename_privateuse1_backend(STAND_IN)  # type: ignore[attr-defined]
    torch._register_device_module(STAND_IN, module)
    torch._C._acc.register_python_privateuseone_hook(hooks)
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    _held.extend((hooks, guard))


def fake_tensors() -> contextlib.AbstractContextManager[Any]:
    """A mode in which tensors have shapes, and no numbers; single ones on the CPU have theirs."""

    class Mode(FakeTensorMode):
        def may_turn_const(self, tensor: torch.Tensor) -> bool:
            return tensor.device.type == "cpu" and super().may_turn_const(tensor)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.addmm.dtype_out:  # in which PyTorch 2.11 takes the dtype for ``beta``
                return kwargs["out"]
            return super().__torch_dispatch__(func, types, args, kwargs)

    return Mode(allow_non_fake_inputs=True)


def library(namespace: str) -> Any:
    """Where functions of the stand-in device are registered; for the life of the process."""
    _held.append(made := torch.library.Library(namespace, "IMPL"))
    return made


def register_constants() -> None:
    """Let ``torch.tensor(1.0, device=...)`` be made: fake tensors hold constants as tensors that are not fake."""
    lib, made = library("aten"), torch._C._acc.create_empty_tensor
    lib.impl("empty_strided", lambda size, stride, *, dtype, **_: made(size, dtype), "PrivateUse1")
    lib.impl("_copy_from", lambda source, target, non_blocking=False: target, "PrivateUse1")


def without_autocast() -> Any:
    """A context in which the dispatcher passes autocast by."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
    return torch._C._ExcludeDispatchKeyGuard(keys)


def overloads(name: str) -> Iterator[Callable[..., Any]]:
    """The overloads of ``aten::name`` that CUDA's autocast has a kernel for, in this version of PyTorch."""
    packet = getattr(torch.ops.aten, name, None)
    for overload in packet.overloads() if packet is not None else ():
        func = getattr(packet, overload)
        if is_registered(func.name(), "AutocastCUDA"):
            yield func
