"""A language model's head: what makes logits of hidden states, when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_memsave.errors import KeptTensorChangedError
from hf_memsave.tape.private import AutocastState

#: A function, and its other arguments.
Step = tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Head:
    """What computes logits.

    Attributes:
        module: The head, whose parameters want gradients or not.
        forward: Its own forward.
        steps: What is done to its output, one number at a time.
        autocast: Under which it runs.
        versions: Of its parameters: see :func:`versions_of`.
    """

    module: nn.Module
    forward: Callable[[Tensor], Tensor]
    steps: tuple[Step, ...]
    autocast: AutocastState
    versions: tuple[tuple[int, int, int], ...]

    def __call__(self, hidden: Tensor) -> Tensor:
        """The logits of ``hidden`` ``[..., H]``.

        Returns:
            ``[..., V]``.

        Raises:
            KeptTensorChangedError: A parameter of the head was written to, or freed, since the forward.
        """
        if self.versions != versions_of(self.module):
            raise KeptTensorChangedError(
                "these logits are computed when they are first read, and the head's weights have been written to, or "
                "freed, since the forward. Read them before optimizer.step(), or use MemSaveConfig(loss='stock')."
            )
        with self.autocast:
            logits = self.forward(hidden)
            for func, args, kwargs in self.steps:
                logits = func(logits, *args, **kwargs)
        return logits

    def parameters(self) -> list[Tensor]:
        """Those of the module that want a gradient."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]


def versions_of(module: nn.Module) -> tuple[tuple[int, int, int], ...]:
    """By which a later write to a parameter shows, and that FSDP2 or ZeRO-3 has taken it away."""
    return tuple((id(parameter), parameter._version, parameter.numel()) for parameter in module.parameters())
