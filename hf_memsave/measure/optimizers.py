"""Optimizers by the names under which ``Trainer`` knows them, as far as their memory goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.optimization import Adafactor

#: Elements from which on bitsandbytes keeps a state in 8 bits, and how many of them share a scale.
_SMALLEST_8BIT, _BLOCK = 4096, 256


class _AdamW8bit(torch.optim.Optimizer):
    """The states of bitsandbytes' AdamW8bit, which updates in place: two bytes an element, and their scales."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it is given no closure
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if not self.state[p]:
                is_small = p.numel() < _SMALLEST_8BIT
                dtype, scales = (torch.float32, 0) if is_small else (torch.uint8, -(-p.numel() // _BLOCK))
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state[p][name] = torch.empty_like(p, dtype=dtype)
                    self.state[p][f"{name}_scales"] = p.new_empty(scales, dtype=torch.float32)


def _adafactor(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = Adafactor(parameters, lr=1e-3, scale_parameter=False, relative_step=False)
    return made


#: Name -> what makes one of parameters.
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adamw_8bit": _AdamW8bit,
    "adafactor": _adafactor,
    "sgd": lambda parameters: torch.optim.SGD(parameters, foreach=True),
    "sgd_momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9, foreach=True),
}

#: What a step takes for all parameters at once, of the bytes of their gradients. Adafactor's is no multiple of them.
TEMPORARIES = {"adamw": 1, "adamw_fused": 0, "adamw_8bit": 0, "sgd": 0, "sgd_momentum": 0}
