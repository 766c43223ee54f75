"""Linears that run again in backward, as the classes that they are: a tape knows them by their weights.

A chosen linear carries a mark, which copies, pickles and replicas of the model carry too. Which tensor its weight is,
is looked up while its block runs: moved, assigned, sharded and gathered, it is another one each time.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

from torch import nn

#: On a linear that runs again.
AGAIN = "_memsave_again"
#: Such linears in each block, or model, that has run.
_known: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()


def choose_again(model: nn.Module, linears: Collection[nn.Module]) -> None:
    """Have tapes run ``linears`` of ``model`` again, and no others."""
    for module in model.modules():
        if module in linears:
            module.__dict__[AGAIN] = True
        else:
            module.__dict__.pop(AGAIN, None)
    _known.clear()


def weights_in(module: nn.Module) -> list[dict[str, Any]]:
    """Where to find the weights of linears in ``module`` that run again: FSDP1 and replicas have them as attributes."""
    refs = _known.get(module)
    if refs is None:
        refs = _known[module] = [weakref.ref(m) for m in module.modules() if AGAIN in m.__dict__]
    return [own for ref in refs if (m := ref()) is not None for own in (m._parameters, m.__dict__)]
