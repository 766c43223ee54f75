"""``activation``: an activation with an inexact gradient: ``inverted``, ``precision_bit`` or ``few_bit``, by value."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hf_memsave.ops.approximate.few_bit import FewBit, few_bit
from hf_memsave.ops.approximate.inverse import ACTIVATIONS, name_of
from hf_memsave.ops.approximate.inverted import inverted
from hf_memsave.ops.op import Op


def _activation(module: nn.Module, patch: Any, input: Tensor) -> Tensor:
    stock, name = partial(patch.stock.forward, module), name_of(module)
    if name is None or not input.requires_grad or _check(module, patch.value):  # it may have changed since
        return stock(input)
    if isinstance(patch.value, FewBit):  # which calls it again in backward, when the module may have changed
        return few_bit(input, name, ACTIVATIONS[name], patch.value.bits)
    return inverted(input, name, stock, in_y=patch.value == "precision_bit")


def _check(module: nn.Module, value: Any) -> str:
    if getattr(module, "inplace", False):
        return "it works in place (inplace=True), so its input is gone"
    act = getattr(module, "act", F.gelu)
    if act is F.gelu or (isinstance(act, partial) and act.func is F.gelu):
        return "" if name_of(module) is not None else "it has no fit"
    return f"expected torch's own gelu, got {getattr(act, '__qualname__', act)}"


ACTIVATION = Op("activation", _activation, _check, replaces_stock=True)
