"""Running steps of a caller's model, and leaving no trace."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from hf_memsave.patching.patch import unpatch
from hf_memsave.patching.swap import set_class

#: How the names begin under which patching keeps things on a module: who owns its buffers, the ledger that waits for
#: the next forward, its sampler and its name there.
_OURS = "_memsave_"


@contextlib.contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Run and patch ``model`` inside, where it is stock at first: at the end, or on an error, everything is as it was.

    That is: what is patched and how, with what its sampler has seen; buffers, gradients, modes, and the random state of
    PyTorch, NumPy and Python.

    Yields:
        A function that puts buffers back and drops gradients in between.
    """
    buffers = [
        (m._buffers, k, b, b.detach().clone()) for m in model.modules() for k, b in m._buffers.items() if b is not None
    ]

    def start_over() -> None:
        for each in buffers:
            _put_back(*each)
        model.zero_grad(set_to_none=True)

    with contextlib.ExitStack() as stack:  # what it calls back is called, even where another one fails
        for each in buffers:
            stack.callback(_put_back, *each)
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
            stack.callback(_restore, module, type(module), _own(module))
        for parameter in model.parameters():
            stack.callback(setattr, parameter, "grad", parameter.grad)
        stack.callback(numpy.random.set_state, numpy.random.get_state())
        stack.callback(random.setstate, random.getstate())
        stack.enter_context(torch.random.fork_rng(range(torch.cuda.device_count())))
        unpatch(model)
        yield start_over


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether the numbers are equal, bit for bit: a NaN is itself, and -0 is not 0."""
    return a.dtype == b.dtype and torch.equal(*(t.reshape(-1).contiguous().view(torch.uint8) for t in (a, b)))


@torch.no_grad()
def _put_back(owner: dict[str, Tensor | None], name: str, buffer: Tensor, values: Tensor) -> None:
    owner[name] = buffer
    # Not all can be written to: one that was expanded overlaps itself, and one may be of inference mode.
    if type(buffer) is not Tensor or buffer.layout != torch.strided or not same_bits(buffer, values):
        buffer.copy_(values)


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name.startswith(_OURS)}


def _restore(module: nn.Module, cls: Any, own: dict[str, Any]) -> None:
    set_class(module, cls)
    for name in _own(module):
        del module.__dict__[name]
    module.__dict__.update(own)
