"""A language model's head: what makes logits of hidden states, when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_memsave.errors import KeptTensorChangedError
from hf_memsave.tape.again import AutocastState

#: A function, and its other arguments.
Step = tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]


class State:
    """What a head's logits depend on beside its input: weights, mode, and the settings of adapters, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.renew()

    def renew(self) -> None:
        """Take it as it is now."""
        self.weights, self.settings = _weights(self.module), _settings(self.module)

    def check(self) -> None:
        """Make sure that it is unchanged.

        Raises:
            KeptTensorChangedError: It is not.
        """
        if self.weights != _weights(self.module):
            raise KeptTensorChangedError(
                "these logits are computed when they are first read, and the head's weights have been written to, or "
                "freed, since the forward. Read them before optimizer.step(), or use MemSaveConfig(loss='stock')."
            )
        if self.settings != _settings(self.module):
            raise KeptTensorChangedError(
                "these logits are computed when they are first read, and since the forward the head was switched: "
                "train() or eval(), or its adapters. Read them before, or use MemSaveConfig(loss='stock')."
            )


def _weights(module: nn.Module) -> list[tuple[int, int, int]]:
    """By which a later write to a parameter shows, and that FSDP2 or ZeRO-3 has taken it away."""
    return [(id(parameter), parameter._version, parameter.numel()) for parameter in module.parameters()]


def _settings(module: nn.Module) -> list[tuple[bool, str]]:
    """Whatever its modules hold that is a number, a text or a collection of those; and which of them draw."""
    return [
        (draws(m), repr({name: v for name, v in vars(m).items() if name not in _OF_MODULES and _is_plain(v)}))
        for m in module.modules()
    ]


#: What every module has.
_OF_MODULES = vars(nn.Module()).keys()


def draws(module: nn.Module) -> bool:
    """Whether it is a dropout that is on, or an adapter with one of its own, such as LoHa's ``rank_dropout``."""
    if not module.training:
        return False
    own = [value for name, value in vars(module).items() if name.endswith("dropout")]
    is_dropout = "dropout" in type(module).__name__.lower() and bool(getattr(module, "p", 0))
    return is_dropout or any(any(value.values()) if isinstance(value, dict) else value for value in own)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


@dataclass(frozen=True)
class Head:
    """What computes logits.

    Attributes:
        module: The head, whose parameters want gradients or not.
        forward: Its own forward.
        steps: What is done to its output, one number at a time.
        autocast: Under which it runs.
        state: What its logits depend on beside its input.
        fuses_loss: A kernel may write a loss's gradient over logits that this computes, and nobody else holds.
        of_rows: What computes a chunk of them, where that is not ``forward``; equal to it up to the order of sums.
    """

    module: nn.Module
    forward: Callable[[Tensor], Tensor]
    steps: tuple[Step, ...]
    autocast: AutocastState
    state: State
    fuses_loss: bool = False
    of_rows: Callable[[Tensor], Tensor] | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """The logits of ``hidden`` ``[..., H]``, of the head as it was in the forward.

        Returns:
            ``[..., V]``.

        Raises:
            KeptTensorChangedError: The head is another one than in the forward.
        """
        self.state.check()
        logits = self._run(self.forward, hidden)
        self.state.renew()  # some adapters write to their own weights
        return logits

    def compute(self, hidden: Tensor) -> Tensor:
        """Logits of a chunk of rows, of the head as it is."""
        return self._run(self.of_rows or self.forward, hidden)

    def _run(self, forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        with self.autocast:
            logits = forward(hidden)
            for func, args, kwargs in self.steps:
                logits = func(logits, *args, **kwargs)
        return logits

    def parameters(self) -> list[Tensor]:
        """The module's parameters that want a gradient."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]
