"""A CUDA device that is not there: its tensors have shapes, dtypes and bytes, and no numbers.

A model runs on it forward and backward as on CUDA, in seconds and without weights: autocast with CUDA's lists, fused
dropout and norms, the attention kernels of CUDA. What reads a number raises, as it would make a CUDA program wait.
Nothing is known of time, nor of what a kernel takes for itself while it runs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import masking_utils

from hf_memsave.count.kept import one_at_a_time
from hf_memsave.device import HALVES, STAND_IN
from hf_memsave.errors import MeasureError, MemSaveError
from hf_memsave.measure.kernels import ATTENTION, Preferred, register_kernels
from hf_memsave.measure.private import fake_tensors, register_constants, register_device, why_not

P = ParamSpec("P")
R = TypeVar("R")
#: Variables that hide GPUs from CUDA, and from ROCm.
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
#: The state of a generator of CUDA's: a seed and an offset.
STATE_BYTES = 16


class _Generator:
    def get_state(self, device: Any = None) -> Tensor:
        return torch.empty(STATE_BYTES, dtype=torch.uint8, device="cpu")

    def set_state(self, state: Tensor, device: Any = None) -> None:
        pass


class _Module:
    """What ``torch.cuda`` is for CUDA."""

    default_generators = (_Generator(),)
    get_rng_state, set_rng_state = default_generators[0].get_state, default_generators[0].set_state
    _initialized = True
    thread: int | None = None  # to which the device is there: others train on what the machine has

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return self.thread == threading.get_ident()

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

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [*HALVES]


_module = _Module()


@functools.cache
def _register() -> None:
    if (reason := why_not()) is not None:
        raise MeasureError(reason)
    register_device(_module, _module.is_available)
    register_constants()
    register_kernels()


def _without_needless_masks(padded: bool) -> Any:
    """Have Transformers make no S x S mask but those it makes on a GPU, where it reads what is packed and padded."""
    find = masking_utils.find_packed_sequence_indices
    replaced: dict[str, Any] = {"find_packed_sequence_indices": lambda x: None if _is_there(x) else find(x)}
    for name in () if padded else ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
        replaced[name] = functools.partial(_of_ones, getattr(masking_utils, name))
    return mock.patch.multiple(masking_utils, **replaced)  # for all threads: others call them with other tensors


def _of_ones(may_skip: Callable[..., bool], padding_mask: Any, *sizes: Any, **more: Any) -> bool:
    # Decoders like BART's make a mask of ones where they are given none.
    return may_skip(None if _is_there(padding_mask) else padding_mask, *sizes, **more)


def _is_there(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == STAND_IN


@contextlib.contextmanager
def fake_device(attention: str = "flash", padded: bool = True) -> Iterator[torch.device]:
    """Inside, the device is there, with a preferred kernel, for padded batches or others; else MeasureError."""
    if attention not in ATTENTION:
        raise MeasureError(f"attention: expected one of {', '.join(ATTENTION)}, got {attention!r}. Use 'flash'.")
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_at_a_time)
        _register()
        stack.enter_context(mock.patch.object(Preferred, "name", attention))
        stack.enter_context(mock.patch.object(_module, "thread", threading.get_ident()))
        if gc.get_freeze_count() == 0:  # the collector, and what counts live tensors by it, leave out what was there
            stack.callback(gc.unfreeze)
            gc.freeze()
        # Backward runs on this thread: the engine's others were started before the device was known.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(_without_needless_masks(padded))
        stack.enter_context(fake_tensors())
        yield torch.device(STAND_IN, 0)


def to_fake(model: nn.Module, device: torch.device) -> nn.Module:
    """Give ``model``, which may be on the meta device, fake parameters and buffers on ``device``, in place."""
    made: dict[int, Tensor] = {}
    homes: list[dict[str, Any]] = [home for m in model.modules() for home in (m._parameters, m._buffers)]
    for owned in homes:
        for name, tensor in owned.items():
            if tensor is not None and id(tensor) not in made:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
            if tensor is not None:
                owned[name] = made[id(tensor)]
    return model


def without_gpus(function: Callable[P, R]) -> Callable[P, R]:
    """Have ``function``, of a module, run in another process wherever this one has a GPU, as it would lose it."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.cuda.is_available():
            with one_at_a_time:  # Transformers sets the process's default dtype as it builds a model
                return function(*args, **kwargs)
        path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, **dict.fromkeys(_HIDING, ""), "PYTHONPATH": os.pathsep.join(path)}
        command = [sys.executable, "-c", f"from {__name__} import _answer; _answer()"]
        asked = pickle.dumps((function.__module__, function.__qualname__, args, kwargs))
        done = subprocess.run(command, input=asked, stdout=subprocess.PIPE, env=environment, check=False)
        if done.returncode:
            raise MeasureError(
                f"{function.__qualname__} failed in a process without GPUs, with exit code {done.returncode}: its "
                "error is above. Run all of it with CUDA_VISIBLE_DEVICES= in the environment."
            )
        result: R | MemSaveError = pickle.loads(done.stdout)
        if isinstance(result, MemSaveError):
            raise result
        return result

    return run


def _answer() -> None:
    """Run what standard input asks for, in a process without GPUs."""
    answer, sys.stdout = sys.stdout.buffer, sys.stderr  # whatever else is printed is no answer
    module, name, args, kwargs = pickle.loads(sys.stdin.buffer.read())
    try:
        result = getattr(importlib.import_module(module), name)(*args, **kwargs)
    except MemSaveError as error:
        result = error
    answer.write(pickle.dumps(result))
