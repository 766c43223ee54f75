"""A stand-in for a CUDA device: its tensors have shapes, dtypes and sizes in bytes, and no values.

A model runs on it forward and backward as on CUDA, in seconds and without weights: autocast with CUDA's lists, fused
dropout and norms, its attention kernels. Reading a value raises. Time and kernels' workspaces are not modelled.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar
from unittest import mock

import numpy
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import masking_utils

from hf_memsave.count.kept import one_at_a_time
from hf_memsave.device import HALVES, STAND_IN
from hf_memsave.errors import MeasureError, MemSaveError
from hf_memsave.measure.kernels import ATTENTION, preferred, register_kernels
from hf_memsave.measure.private import fake_tensors, register_device, why_not
from hf_memsave.tape.private import is_running

P = ParamSpec("P")
R = TypeVar("R")
#: Bytes of a CUDA generator's state: a seed and an offset.
STATE_BYTES = 16

_generator = SimpleNamespace(
    get_state=lambda device=None: torch.empty(STATE_BYTES, dtype=torch.uint8, device="cpu"),
    set_state=lambda state, device=None: None,
)
#: The counterpart of ``torch.cuda``. The device is available to one thread: others train on real devices.
_module: Any = SimpleNamespace(
    thread=None, is_available=lambda: _module.thread == get_ident(),
    _initialized=True, is_initialized=lambda: True, _is_in_bad_fork=lambda: False,
    device_count=lambda: 1, current_device=lambda: 0, device=lambda index: contextlib.nullcontext(),
    default_generators=(_generator,), get_rng_state=_generator.get_state, set_rng_state=_generator.set_state,
    manual_seed_all=lambda seed: None, get_amp_supported_dtype=lambda: [*HALVES],
)  # fmt: skip


@functools.cache
def _register() -> None:
    if (reason := why_not()) is not None:
        raise MeasureError(reason)
    register_device(_module)
    register_kernels()


class _GpuMasks(TorchFunctionMode):
    """A mode in which Transformers makes only the S x S masks that it makes on a GPU, where it reads values.

    Its tensors have no values here. So on this thread it is told that no sequences are packed, and where nothing is
    padded, that there is no mask (decoders like BART's make one of ones).
    """

    lets_by = True  # fused layers may run: this mode needs to see the two calls below alone

    def __init__(self, padded: bool) -> None:
        super().__init__()
        self.padded = padded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cumsum and is_running(masking_utils.find_packed_sequence_indices):
            return numpy.zeros((1, 1))  # in which it looks for another number
        if func is Tensor.to and not self.padded and is_running(masking_utils._preprocess_mask_arguments):
            return None
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def fake_device(attention: str = "flash", padded: bool = True) -> Iterator[torch.device]:
    """Provide the stand-in device inside, with a preferred kernel, for padded batches or others; else MeasureError."""
    if attention not in ATTENTION:
        raise MeasureError(f"attention: expected one of {', '.join(ATTENTION)}, got {attention!r}. Use 'flash'.")
    with one_at_a_time:
        _register()
        with mock.patch.object(preferred, "name", attention), mock.patch.object(_module, "thread", get_ident()):
            # Backward runs on this thread: the engine's others were started before the device was known.
            with torch.autograd.set_multithreading_enabled(False), _GpuMasks(padded), fake_tensors():
                yield torch.device(STAND_IN, 0)


def to_fake(model: nn.Module, device: torch.device) -> nn.Module:
    """Replace the parameters and buffers of ``model``, even meta ones, by fake ones on ``device``, in place."""

    @functools.cache  # what is shared stays shared
    def fake(tensor: Tensor) -> Any:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    for module in model.modules():
        for owned in (module._parameters, module._buffers):
            owned.update({name: fake(tensor) for name, tensor in owned.items() if tensor is not None})
    return model


def without_gpus(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a module-level function to run in another process, without GPUs, where this process would lose its own."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.cuda.is_available():
            return function(*args, **kwargs)
        path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        hiding = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "")
        environment = os.environ | hiding | {"PYTHONPATH": os.pathsep.join(path)}
        command = [sys.executable, "-c", f"from {__name__} import _answer; _answer()"]
        asked = pickle.dumps((run, args, kwargs))  # of which the function goes by its name
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
    """Run the pickled call read from standard input, in a process without GPUs, and write its result."""
    answer, sys.stdout = sys.stdout.buffer, sys.stderr  # whatever else is printed is no answer
    function, args, kwargs = pickle.loads(sys.stdin.buffer.read())
    try:
        result = function(*args, **kwargs)
    except MemSaveError as error:
        result = error
    answer.write(pickle.dumps(result))
