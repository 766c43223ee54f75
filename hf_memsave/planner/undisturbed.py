"""Running steps of somebody's model, and leaving no trace."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

import numpy
import torch
from torch import nn

from hf_memsave.patch import patch, unpatch
from hf_memsave.swap import patched_models


@contextlib.contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Run and patch ``model`` inside: at the end, or on an error, everything is as it was.

    That is: what is patched and how, buffers, gradients, modes, and the random state of PyTorch, NumPy and Python.

    Args:
        model: Stock or patched.

    Yields:
        A function that puts buffers back and drops gradients in between.
    """
    buffers = [(m._buffers, k, b, b.clone()) for m in model.modules() for k, b in m._buffers.items() if b is not None]
    gradients = [(p, p.grad) for p in model.parameters()]
    modes = [(m, m.training) for m in model.modules()]
    configs = [(m, m.__dict__["config"]) for m in model.modules() if "config" in m.__dict__]
    patched = patched_models(model)
    states = random.getstate(), numpy.random.get_state()

    @torch.no_grad()
    def start_over() -> None:
        for owner, name, buffer, values in buffers:
            owner[name] = buffer.copy_(values)
        model.zero_grad(set_to_none=True)

    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield start_over
    finally:
        unpatch(model)
        for module, config in patched:
            patch(module, config)
        if not patched:  # patching gave the model copies of its own
            for module, config in configs:
                module.__dict__["config"] = config
        start_over()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, mode in modes:
            module.training = mode
        random.setstate(states[0])
        numpy.random.set_state(states[1])
