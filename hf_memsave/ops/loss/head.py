"""A language model's head: what makes logits of hidden states, when they are asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hf_memsave.errors import KeptTensorChangedError, PatchError
from hf_memsave.tape.again import AutocastState
from hf_memsave.tape.private import without_hooks

#: A function and its other arguments.
Step = tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]
#: What every module has.
_OF_MODULES = vars(nn.Module()).keys()


def followed(z: Tensor, steps: tuple[Step, ...]) -> Tensor:
    """``z`` after ``steps``."""
    for func, args, kwargs in steps:
        z = func(z, *args, **kwargs)
    return z


def _weights(module: nn.Module) -> list[tuple[int, int, int]]:
    """By which a later write to a parameter shows, and that FSDP2 or ZeRO-3 has taken it away."""
    return [(id(parameter), parameter._version, parameter.numel()) for parameter in module.parameters()]


def _settings(module: nn.Module) -> list[tuple[bool, str]]:
    """Of each module, whether it draws, and its attributes that are numbers, texts or collections of those."""
    return [
        (draws(m), repr({name: v for name, v in vars(m).items() if name not in _OF_MODULES and _is_plain(v)}))
        for m in module.modules()
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        value = (*value, *value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def draws(module: nn.Module) -> bool:
    """Whether it is a dropout that is on, or an adapter with one of its own, such as LoHa's ``rank_dropout``."""
    if not module.training:
        return False
    own = [value for name, value in vars(module).items() if name.endswith("dropout")]
    is_dropout = "dropout" in type(module).__name__.lower() and bool(getattr(module, "p", 0))
    return is_dropout or any(any(value.values()) if isinstance(value, dict) else value for value in own)


def gradients(y: Tensor, inputs: Sequence[Tensor], dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of each of ``inputs``, or None; their hooks wait for the whole one.

    Returns:
        None for inputs that y is not computed from.

    Raises:
        PatchError: Another leaf than these wants a gradient of y.
    """
    nodes = [] if y.grad_fn is None else [y.grad_fn]
    seen: set[Any] = {get_gradient_edge(tensor).node for tensor in inputs if tensor.requires_grad}
    for node in nodes:  # which grows
        if node.name() == "torch::autograd::AccumulateGrad":
            raise PatchError(
                "chunked loss: expected a head whose logits are computed from its input and its own parameters, got "
                "one that uses other tensors that want a gradient, and would get none. Use "
                "MemSaveConfig(loss='stock')."
            )
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        nodes.extend(new)
    with without_hooks(inputs):
        return torch.autograd.grad(y, inputs, dy, allow_unused=True)


@dataclass(eq=False)
class Head:
    """What computes logits, under an autocast state."""

    module: nn.Module
    forward: Callable[[Tensor], Tensor]  # its own
    autocast: AutocastState
    fuses_loss: bool = False  # a kernel may write the loss's gradient over logits, which nothing else holds
    of_rows: Callable[[Tensor], Tensor] | None = None  # for a chunk: equal to ``forward`` up to the order of sums
    steps: tuple[Step, ...] = ()  # what is done to its output, one number at a time
    state: list[Any] = field(default_factory=list)  # shared with all that follow by a step

    def __post_init__(self) -> None:
        self.renew()

    def with_steps(self, steps: tuple[Step, ...], fuses_loss: bool = False) -> Head:
        """The head with these steps instead of its own, and this ``fuses_loss``."""
        after = copy.copy(self)
        after.steps, after.fuses_loss = steps, fuses_loss
        return after

    def renew(self) -> None:
        """Take what logits depend on beside their input (weights, mode, settings of adapters) as it is now."""
        self.state[:] = _weights(self.module), _settings(self.module)

    def check(self) -> None:
        """Raise KeptTensorChangedError where it is not as it was."""
        weights, settings = self.state
        changed = ""
        if weights != _weights(self.module):
            changed = "the head's weights have been written to, or freed, since the forward. Read them before "
            changed += "optimizer.step()"
        elif settings != _settings(self.module):
            changed = "since the forward the head was switched: train() or eval(), or its adapters. Read them before"
        if changed:
            raise KeptTensorChangedError(
                f"these logits are computed when they are first read, and {changed}, or use "
                "MemSaveConfig(loss='stock')."
            )

    def __call__(self, hidden: Tensor) -> Tensor:
        """The logits ``[..., V]`` of ``hidden`` ``[..., H]``, if the head is as it was."""
        self.check()
        logits = self._run(self.forward, hidden)
        self.renew()  # some adapters write to their own weights
        return logits

    def of_chunk(self, hidden: Tensor) -> Tensor:
        """Logits of a chunk of rows, of the head as it is."""
        return self._run(self.of_rows or self.forward, hidden)

    def _run(self, forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        with self.autocast:
            return followed(forward(hidden), self.steps)

    def parameters(self) -> list[Tensor]:
        """The module's parameters that want a gradient."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]
