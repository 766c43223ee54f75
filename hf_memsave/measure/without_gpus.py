"""Run a function in a process of its own, which sees no GPU: ``python -m hf_memsave.measure.without_gpus``.

The stand-in device takes the place of the machine's accelerator in PyTorch for the rest of a process. It takes the
seconds that importing PyTorch and Transformers takes.
"""

from __future__ import annotations

import functools
import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from hf_memsave.errors import MeasureError, MemSaveError

P = ParamSpec("P")
R = TypeVar("R")
#: Variables that hide GPUs from CUDA, and from ROCm.
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def without_gpus(function: Callable[P, R]) -> Callable[P, R]:
    """Have ``function``, of a module, run in another process wherever this one has a GPU."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.cuda.is_available():
            return function(*args, **kwargs)
        result: R = _run_apart(function.__module__, function.__qualname__, args, kwargs)
        return result

    return run


def _run_apart(module: str, name: str, args: Any, kwargs: Any) -> Any:
    path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **dict.fromkeys(_HIDING, ""), "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-m", "hf_memsave.measure.without_gpus"]
    asked = pickle.dumps((module, name, args, kwargs))
    done = subprocess.run(command, input=asked, stdout=subprocess.PIPE, env=environment, check=False)
    if done.returncode:
        raise MeasureError(
            f"{name} failed in a process without GPUs, with exit code {done.returncode}: its error is above. Run "
            "all of it with CUDA_VISIBLE_DEVICES= in the environment."
        )
    result = pickle.loads(done.stdout)
    if isinstance(result, MemSaveError):
        raise result
    return result


def _main() -> None:
    answer, sys.stdout = sys.stdout.buffer, sys.stderr  # whatever else is printed is no answer
    module, name, args, kwargs = pickle.loads(sys.stdin.buffer.read())
    try:
        result = getattr(importlib.import_module(module), name)(*args, **kwargs)
    except MemSaveError as error:
        result = error
    answer.write(pickle.dumps(result))


if __name__ == "__main__":
    _main()
