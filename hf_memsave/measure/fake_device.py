"""A CUDA device that is not there: its tensors have shapes, dtypes and bytes, and no numbers.

A model runs on it forward and backward as on CUDA, in seconds and without weights: autocast with CUDA's lists, fused
dropout and norms, the attention kernels of CUDA. What reads a number raises, as it would make a CUDA program wait.
Nothing is known of time, nor of what a kernel takes for itself while it runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hf_memsave.device import STAND_IN
from hf_memsave.errors import MeasureError
from hf_memsave.measure.autocast_lists import register_autocast
from hf_memsave.measure.kernels import ATTENTION, Preferred, register_kernels
from hf_memsave.measure.private import fake_tensors, register_constants, register_device, why_not

#: The state of a generator of CUDA's: a seed and an offset.
STATE_BYTES = 16


class _Generator:
    def get_state(self) -> Tensor:
        return torch.empty(STATE_BYTES, dtype=torch.uint8, device="cpu")

    def set_state(self, state: Tensor) -> None:
        pass


class _Module:
    """What ``torch.cuda`` is for CUDA."""

    default_generators = (_Generator(),)
    _initialized = True
    depth = 0

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return self.depth > 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def device(self, index: Any) -> Any:
        return contextlib.nullcontext()

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> Tensor:
        return self.default_generators[0].get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_module = _Module()


@cache
def _register() -> None:
    if (reason := why_not()) is not None:
        raise MeasureError(reason)
    register_device(_module, _module.is_available)
    register_constants()
    register_autocast()
    register_kernels()


@contextlib.contextmanager
def fake_device(attention: str = "flash") -> Iterator[torch.device]:
    """Inside, the stand-in device is there, and all new tensors are fake, on whatever device.

    Args:
        attention: The kernel to prefer: "flash", "efficient" or "cudnn".

    Yields:
        The device.

    Raises:
        MeasureError: There is no such kernel or device in this version of PyTorch, or there are GPUs.
    """
    if attention not in ATTENTION:
        raise MeasureError(f"attention: expected one of {', '.join(ATTENTION)}, got {attention!r}. Use 'flash'.")
    _register()
    before, Preferred.name = Preferred.name, attention
    _module.depth += 1
    try:
        # Backward runs on this thread: the engine's others were started before the device was known.
        with torch.autograd.set_multithreading_enabled(False), fake_tensors():
            yield torch.device(STAND_IN, 0)
    finally:
        _module.depth -= 1
        Preferred.name = before


def to_fake(model: nn.Module, device: torch.device) -> nn.Module:
    """Give ``model``, which may be on the meta device, fake parameters and buffers on ``device``, in place."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        homes: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        for owned in homes:
            for name, tensor in owned.items():
                if tensor is not None:
                    owned[name] = made.setdefault(id(tensor), _fake(tensor, device))
    return model


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
