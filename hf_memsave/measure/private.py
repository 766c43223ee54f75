"""The private or experimental names of PyTorch that the stand-in device needs; one test names them all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from hf_memsave.device import STAND_IN
from hf_memsave.tape.private import FakeTensorMode, backward_id, is_registered

#: Objects that PyTorch was given and does not keep alive.
_held: list[Any] = []
#: The names in ``torch._C._acc`` that a device written in Python needs.
_NEEDED = """PrivateUse1Hooks DeviceGuard register_python_privateuseone_hook register_python_privateuseone_device_guard
create_empty_tensor""".split()


def why_not() -> str | None:
    """Return why this process cannot have the stand-in for a CUDA device; None where it can, or has it."""
    if torch.cuda.is_available():
        return (
            "the stand-in for a CUDA device needs a process without GPUs, as PyTorch would take it for theirs until "
            "the process ends. Run it with CUDA_VISIBLE_DEVICES= in the environment; hf_memsave.estimate does so."
        )
    missing = [name for name in _NEEDED if not hasattr(getattr(torch._C, "_acc", None), name)]
    if missing:
        got = f"{torch.__version__} without {missing[0]}"
        return f"the stand-in for a CUDA device needs PyTorch 2.10 or later, got {got}. Run: pip install -U torch"
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", STAND_IN):
        return (
            f"the stand-in for a CUDA device needs PyTorch's place for one more backend, which {taken!r} has taken. "
            "Run the estimate in a process that does not import that library."
        )
    return None


def register_device(module: Any) -> None:
    """Register the stand-in device, once per process; ``module`` is its counterpart of ``torch.cuda``."""

    class Hooks(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:  # else PyTorch takes it for the machine's accelerator, and pins memory for it
            return bool(module.is_available())

        def has_primary_context(self, index: int) -> bool:
            return self.is_available()

        def is_built(self) -> bool:
            return True

    class Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.PrivateUse1

    _held.extend((hooks := Hooks(), guard := Guard()))
    torch.utils.rename_privateuse1_backend(STAND_IN)  # type: ignore[attr-defined]
    torch._register_device_module(STAND_IN, module)
    torch._C._acc.register_python_privateuseone_hook(hooks)
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    # torch.tensor(1.0, device=...) needs both: fake tensors hold constants as tensors that are not fake.
    lib, made = library("aten"), torch._C._acc.create_empty_tensor
    lib.impl("empty_strided", lambda size, stride, *, dtype, **_: made(size, dtype), "PrivateUse1")
    lib.impl("_copy_from", lambda source, target, non_blocking=False: target, "PrivateUse1")


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Make the tensors inside fake: with shapes and no values; one-element constants on the CPU keep theirs."""
    errors: list[Exception] = []
    grouped: Any = getattr(getattr(torch.ops.aten, "_grouped_mm", None), "default", None)

    class Mode(FakeTensorMode):
        def may_turn_const(self, tensor: torch.Tensor) -> bool:
            return tensor.device.type == "cpu" and super().may_turn_const(tensor)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.addmm.dtype_out:  # in which PyTorch 2.11 takes the dtype for ``beta``
                return kwargs["out"]
            if func is grouped and args[0].dtype is not torch.bfloat16:  # which CUDA runs too, and the shapes refuse
                with self:
                    low = (x.to(torch.bfloat16) for x in args[:2])
                    return func(*low, *args[2:], **(kwargs or {})).to(args[0].dtype)
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            except Exception as error:
                # PyTorch ends the process where an op of a node of autograd raises on a device written in Python.
                if backward_id() < 0:
                    raise
                errors.append(error)
                made = [torch.empty_like(args[0]) for _ in func._schema.returns]
                return made if len(made) > 1 else made[0]

    try:
        with Mode(allow_non_fake_inputs=True):
            yield
    finally:
        for error in errors[:1]:
            raise error


def library(namespace: str) -> Any:
    """Return a new library to register the stand-in device's functions in; it lives as long as the process."""
    _held.append(made := torch.library.Library(namespace, "IMPL"))
    return made


def without_autocast() -> Any:
    """Return a context in which the dispatcher skips autocast on the stand-in device."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
    return torch._C._ExcludeDispatchKeyGuard(keys)


def overloads(name: str) -> list[Any]:
    """Return the overloads of ``aten::name`` that CUDA's autocast has a kernel for in this version of PyTorch."""
    packet = getattr(torch.ops.aten, name, None)
    functions = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return [func for func in functions if is_registered(func.name(), "AutocastCUDA")]
