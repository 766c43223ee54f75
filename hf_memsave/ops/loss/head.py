"""Calls of a language model's head, whose logits are computed when they are asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hf_memsave.device import has_numbers
from hf_memsave.errors import KeptTensorChangedError, PatchError
from hf_memsave.tape.private import no_modes, without_hooks
from hf_memsave.tape.recomputed import AutocastState
from hf_memsave.tape.tensors import is_plain, nodes_before

#: Attributes that every module has.
_OF_MODULES = vars(nn.Module()).keys()


class HeadCall:
    """One call of a head of ``words`` classes: how to compute its logits, and the state of all that they depend on."""

    def __init__(
        self, module: nn.Module, forward: Callable[[Tensor], Tensor], hidden: Tensor, words: int,
        of_rows: Callable[[Tensor], Tensor] | None = None, fuses_loss: bool = False,
    ) -> None:  # fmt: skip
        self.module, self.forward, self.words, self.count = module, forward, words, hidden.shape[:-1].numel()
        self.of_rows = of_rows or forward  # of a chunk: equal to ``forward`` up to the order of sums
        self.fuses_loss = fuses_loss  # a kernel may write a loss's gradient over logits
        self.autocast = AutocastState.now(hidden.device.type)
        self.weights = list(module.parameters())
        self.given, self.was = _state_of(hidden), self._now()

    def wanted(self) -> list[Tensor]:
        """Return the weights that want a gradient."""
        return [parameter for parameter in self.weights if parameter.requires_grad]

    def check(self, hidden: Tensor) -> None:
        """Raise KeptTensorChangedError if weights, ``hidden`` or settings changed since the forward."""
        (weights, settings), (weights_now, settings_now) = self.was, self._now()
        changed = ""
        if not _are_equal([self.given], [_state_of(hidden)]):
            changed = "the hidden states that they are made of have been written to"
        elif not _are_equal(weights, weights_now):
            changed = "the head's weights have been written to, or freed"
        elif settings != settings_now:
            changed = "the head was switched: train() or eval(), or its adapters"
        if changed:
            raise KeptTensorChangedError(
                f"these logits are computed when they are read, and since the forward {changed}. Read them before that "
                "(before optimizer.step()), or use MemSaveConfig(loss='stock')."
            )

    def logits(self, x: Tensor, is_chunk: bool = False) -> Tensor:
        """Compute logits ``[..., V]`` of x ``[..., H]``, bit for bit stock's, except for a chunk of rows."""
        return self.autocast.run(self.of_rows if is_chunk else self.forward, x)

    def _now(self) -> tuple[list[tuple[Any, Any]], list[Any]]:
        """Return the state of each parameter, and of each module whether it draws random numbers, and its settings."""
        settings: list[Any] = [
            (draws(m), repr({name: v for name, v in vars(m).items() if name not in _OF_MODULES and _is_setting(v)}))
            for m in self.module.modules()
        ]
        if not isinstance(self.forward, partial) or self.forward.func is not F.linear:  # of these very weights
            settings.append([id(parameter) for parameter in self.module.parameters()])
        return list(map(_state_of, self.weights)), settings


@torch.no_grad()
def _state_of(tensor: Tensor) -> tuple[Any, Any]:
    """Return the shape, and a sum of all bits, which shows even writes that autograd misses (a fused optimizer's)."""
    if not (is_plain(tensor) and has_numbers(tensor) and tensor.numel()):
        # Of what a forward made, autograd sees writes itself; and backward is given it as another object.
        return tensor.shape, (id(tensor), tensor._version) if isinstance(tensor, nn.Parameter) else None
    with torch.inference_mode(False), no_modes():
        dense = tensor.detach().reshape(-1)
        whole = dense.nbytes % 8 == 0 and dense.storage_offset() * dense.itemsize % 8 == 0
        bits = dense.view(torch.int64 if whole else torch.uint8)
        table = bits.view(-1, math.gcd(len(bits), 4096))  # of which sums of rows and columns take few bytes
        sums = [table.sum(dim, dtype=torch.int64) for dim in (0, 1)]  # each counts by its place
        return tensor.shape, sum((one * torch.arange(1, 2 * len(one), 2, device=one.device)).sum() for one in sums)


def _are_equal(was: list[tuple[Any, Any]], now: list[tuple[Any, Any]]) -> bool:
    return len(was) == len(now) and all(a[0] == b[0] and bool(a[1] == b[1]) for a, b in zip(was, now, strict=True))


def _is_setting(value: Any) -> bool:
    if isinstance(value, dict):
        value = (*value, *value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_setting, value))
    return value is None or isinstance(value, (bool, int, float, str))


def draws(module: nn.Module) -> bool:
    """Return whether ``module`` is an active dropout, or an adapter with one, such as LoHa's ``rank_dropout``."""
    if not module.training:
        return False
    own = [value for name, value in vars(module).items() if name.endswith("dropout")]
    is_dropout = "dropout" in type(module).__name__.lower() and bool(getattr(module, "p", 0))
    return is_dropout or any(any(value.values()) if isinstance(value, dict) else value for value in own)


def gradients(y: Tensor, inputs: Sequence[Tensor], dy: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradient of each of ``inputs``, None where y does not depend on it; PatchError if others want one."""
    known = [get_gradient_edge(tensor).node for tensor in inputs if tensor.requires_grad]
    if any(node.name() == "torch::autograd::AccumulateGrad" for node in nodes_before([y], known)):
        raise PatchError(
            "chunked loss: expected a head of its input and parameters alone, got one that uses other tensors that "
            "want a gradient, and would get none. Use MemSaveConfig(loss='stock')."
        )
    with without_hooks(inputs):  # which wait for the whole gradient
        return torch.autograd.grad(y, inputs, dy, allow_unused=True)
