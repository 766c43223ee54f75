"""What an op is to the patching layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import nn


class KeptBytes(NamedTuple):
    """Bytes an op makes autograd keep: in stock eager code, and here."""

    eager: int
    here: int


def path_of(cls: type[nn.Module]) -> str:
    """The full name of a class; ours have that of the one they replace."""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_parametrized(module: nn.Module) -> bool:
    """Whether reading a parameter of ``module`` computes it, each time: spectral_norm counts its reads."""
    return "parametrizations" in module._modules


def _nothing(module: nn.Module, value: Any) -> str:
    return ""


@dataclass(frozen=True)
class Op:
    """One replacement of a module's forward.

    Attributes:
        name: What reports call it.
        forward: Called as ``forward(module, patch, *args, **kwargs)``, where ``patch.stock`` is the module's stock
            class and ``patch.value`` what was chosen. It must draw random numbers as stock does.
        check: Returns why this module cannot take the op, or "". Must neither change the module nor run it.
        refuse: Returns why the value that was asked for cannot be had from this module, and the remedy, or "". Unlike
            ``check``, it always ends in an error.
        is_implied: It is not asked for by name: where another tool's forward runs instead, it is skipped, and no error.
        in_place: None where autograd is asked to keep what stock asks for. Else a first step counts that instead, and
            this says how: see :func:`~hf_memsave.tape.as_stock.counted`.
    """

    name: str
    forward: Callable[..., Any]
    check: Callable[[nn.Module, Any], str] = _nothing
    refuse: Callable[[nn.Module, Any], str] = _nothing
    is_implied: bool = False
    in_place: Literal["exact", "cheap", "product"] | None = None
