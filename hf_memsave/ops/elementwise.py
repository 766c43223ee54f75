"""The activations that have an approximate backward: a new one is one entry here, and one run of a script.

Each falls from 0 to one minimum and then rises towards y = x. ``scripts/bench/fit_inverse.py`` reads this table, and
writes what ``inverted`` and its variants need to :mod:`~hf_memsave.ops.inverse`; ``few_bit`` makes its levels
from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_memsave.errors import PatchError


@dataclass(frozen=True)
class Elementwise:
    """An activation.

    Attributes:
        forward: Stock's own expression; its derivative in float64 is taken by autograd.
        modules: Full names of the classes that compute it.
    """

    forward: Callable[[Tensor], Tensor]
    modules: tuple[str, ...]


def _new_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS = {
    "gelu": Elementwise(F.gelu, ("torch.nn.modules.activation.GELU", "transformers.activations.GELUActivation")),
    "gelu_tanh": Elementwise(partial(F.gelu, approximate="tanh"), ("transformers.activations.GELUTanh",)),
    "new_gelu": Elementwise(_new_gelu, ("transformers.activations.NewGELUActivation",)),
    "silu": Elementwise(F.silu, ("torch.nn.modules.activation.SiLU", "transformers.activations.SiLUActivation")),
    "quick_gelu": Elementwise(_quick_gelu, ("transformers.activations.QuickGELUActivation",)),
}

_NAMES = {path: name for name, activation in ACTIVATIONS.items() for path in activation.modules}


def name_of(module: nn.Module) -> str | None:
    """The name in :data:`ACTIVATIONS` of what ``module`` computes, patched or not; None if it has none."""
    cls = type(module)
    name = _NAMES.get(f"{cls.__module__}.{cls.__qualname__}")
    return "gelu_tanh" if name == "gelu" and getattr(module, "approximate", "none") == "tanh" else name


def required_name(module: nn.Module) -> str:
    """As :func:`name_of`, for a module that must have one.

    Returns:
        The name.

    Raises:
        PatchError: The module's class stands nowhere in :data:`ACTIVATIONS`.
    """
    if (name := name_of(module)) is None:
        refuse_unknown(type(module).__name__)
    return name


def refuse_unknown(found: str) -> NoReturn:
    """Raise for an activation that has no entry, or an entry and no fit.

    Raises:
        PatchError: Always; it says how to make one.
    """
    raise PatchError(
        f"activation {found!r} has no fit: expected one of {', '.join(ACTIVATIONS)}. Add it to ACTIVATIONS in "
        "hf_memsave/ops/elementwise.py and fit it with `python scripts/bench/fit_inverse.py`, or use "
        "activation='recompute'."
    )
