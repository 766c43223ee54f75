"""The activations that have an approximate backward.

A new one is an entry here, its class in ``arch/sites.py``, and one run of ``scripts/bench/fit_inverse.py``, which
writes what ``inverted`` and its variants need; ``few_bit`` makes its levels from the forward. Each falls from 0 to one
minimum and then rises towards y = x.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_memsave.arch.sites import ACTIVATIONS as CLASSES
from hf_memsave.arch.sites import path_of
from hf_memsave.errors import PatchError


def _new_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


#: Name -> stock's own expression.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "new_gelu": _new_gelu,
    "silu": F.silu,
    "quick_gelu": _quick_gelu,
}


def name_of(module: nn.Module) -> str | None:
    """The name in :data:`ACTIVATIONS` of what ``module`` computes, patched or not; None if it has none."""
    name = CLASSES.get(path_of(type(module)))
    return "gelu_tanh" if name == "gelu" and getattr(module, "approximate", "none") == "tanh" else name


def required_name(module: nn.Module) -> str:
    """As :func:`name_of`, for a module that must have one; else a PatchError."""
    if (name := name_of(module)) is None:
        refuse_unknown(type(module).__name__)
    return name


def refuse_unknown(found: str) -> NoReturn:
    """Raise a PatchError for an activation that has no entry, or an entry and no fit; it says how to make one."""
    raise PatchError(
        f"activation {found!r} has no fit: expected one of {', '.join(ACTIVATIONS)}. Add it to ACTIVATIONS in "
        "hf_memsave/ops/approximate/elementwise.py, its class to hf_memsave/arch/sites.py, and fit it with `python "
        "scripts/bench/fit_inverse.py`, or use activation='recompute'."
    )
