"""Which parameters a sharding engine takes away between forward and backward, and for how long.

FSDP1, FSDP2 and ZeRO-3 bring a unit's parameters as it begins to run, forward or backward, and take them away in
between: FSDP's units are the modules that the user wrapped, ZeRO-3's are single layers. Where a unit holds a repeated
block, its parameters are there while that block runs. Those of any other unit are told to the tape as brief.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave.tape.record import PARAMETER, Record, Sharded

_FSDP = ("torch.distributed.fsdp._fully_shard", "torch.distributed.fsdp.fully_sharded_data_parallel")


class Units:
    """The units of a model, found when they are first asked for.

    Args:
        model: What runs under one tape.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._units: list[tuple[Callable[[Tensor], bool], Sharded]] | None = None

    def mark_of(self, parameter: Tensor) -> Record:
        """What to mark the storage of a parameter with, by the unit that owns it.

        Returns:
            PARAMETER where no engine does.
        """
        if hasattr(parameter, "ds_id"):
            return _zero3()
        if self._units is None:
            self._units = _units_of(self._model) if any(name in sys.modules for name in _FSDP) else []
        return next((mark for owns, mark in self._units if owns(parameter)), PARAMETER)


def frees_after_forward(module: nn.Module) -> bool:
    """Whether FSDP2 takes the parameters of a unit ``module`` away as its forward ends."""
    return any(group._reshard_after_forward for group in _groups(module))


@cache
def _zero3() -> Sharded:
    return Sharded(is_brief=True)


def _groups(module: nn.Module) -> Any:
    ask: Any = getattr(module, "_get_fsdp_state", None)
    return () if ask is None else ask()._fsdp_param_groups


def _units_of(model: nn.Module) -> list[tuple[Callable[[Tensor], bool], Sharded]]:
    found = []
    for module in model.modules():
        is_whole = module is model or any(isinstance(m, GradientCheckpointingLayer) for m in module.modules())
        handle = vars(module).get("_handle")
        if groups := _groups(module):
            mark = Sharded(frees_after_forward(module) and not is_whole, partial(_unshard, weakref.ref(module)))
            found.append((partial(_is_of_groups, groups), mark))
        elif handle is not None:
            mark = Sharded(handle.uses_sharded_strategy and not is_whole)
            found.append((partial(_is_of_flat, handle.flat_param), mark))
    return found


def _unshard(unit: weakref.ref[Any]) -> None:
    if (module := unit()) is not None:
        module.unshard()


def _is_of_groups(groups: Any, parameter: Tensor) -> bool:
    return any(getattr(p, "_unsharded_param", None) is parameter for group in groups for p in group.fsdp_params)


def _is_of_flat(flat: Any, parameter: Tensor) -> bool:
    return parameter is flat or any(p is parameter for p in flat._params or ())
