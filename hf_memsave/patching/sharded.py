"""Marks of parameters that a sharding engine frees between forward and backward.

FSDP and ZeRO-3 gather a unit's parameters as it begins to run: FSDP's units are the modules that the user wrapped,
ZeRO-3's are single layers. A unit that holds a repeated block has them while that block runs; parameters of any other
are marked ``is_per_module``, even if FSDP2 does not free them after this forward: marks and reruns outlive it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch import Tensor, distributed, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave.errors import PatchError
from hf_memsave.tape.content import PARAMETER, Content
from hf_memsave.tape.parameters import Sharded


def mark_of(model: nn.Module, rung: str | None = None) -> Callable[[Tensor], Content] | None:
    """Return a function that gives the tape of ``model`` the mark of a parameter; None without a process group."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    if hasattr(next(model.parameters(), None), "ds_id"):
        refuse_zero3(model, rung)
        _zero3()  # sets ``Sharded.any_is_per_module``, which tapes read
    units = _units_of(model)

    def mark(parameter: Tensor) -> Content:
        if hasattr(parameter, "ds_id"):
            return _zero3()
        return next((known for owns, known in units if owns(parameter)), PARAMETER)

    return mark


def frees_after_forward(module: nn.Module) -> bool:
    """Return whether FSDP2 frees the parameters of ``module``, a unit, when its forward ends."""
    return any(group._reshard_after_forward for group in _groups(module))


def refuse_zero3(model: nn.Module, rung: str | None) -> None:
    """Raise if linears of ``model`` are to run again in backward, where ZeRO-3 has freed their weights."""
    if rung not in (None, "block", "tiles") and any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        got = "DeepSpeed ZeRO-3's, which are gone when a linear would run again in backward"
        reason = f"checkpoint={rung!r}: expected parameters that stay, got {got}."
        raise PatchError(reason, "Use checkpoint='block' or gradient checkpointing there, or ZeRO-2.")


_zero3 = cache(partial(Sharded, is_per_module=True))


def _groups(module: nn.Module) -> Any:
    if (ask := getattr(module, "_get_fsdp_state", None)) is None:
        return ()
    state: Any = ask()
    groups = getattr(state, "_fsdp_param_groups", None)  # older PyTorch has one, or None
    return [g for g in (state._fsdp_param_group,) if g is not None] if groups is None else groups


def _units_of(model: nn.Module) -> list[tuple[Callable[[Tensor], bool], Sharded]]:
    """Return, for each FSDP unit, a function that tells whether it owns a parameter, and the mark of these."""
    found: list[tuple[Callable[[Tensor], bool], Sharded]] = []
    for module in model.modules():
        is_whole = module is model or any(isinstance(m, GradientCheckpointingLayer) for m in module.modules())
        handle = vars(module).get("_handle")
        if groups := _groups(module):
            mark = Sharded(not is_whole, partial(_unshard, weakref.ref(module)))
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
    return any(p is parameter for p in (flat, *(flat._params or ())))
