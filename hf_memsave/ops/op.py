"""Common parts of ops: their description for patching, and a decorator for backwards that differentiate once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable as of_what_requires_grad

from hf_memsave.device import is_autocast


@dataclass(frozen=True)
class Op:
    """One replacement of a module's forward."""

    name: str  # in reports
    #: Called as ``forward(module, patch, *args, **kwargs)``, where ``patch.stock`` is the module's stock class and
    #: ``patch.value`` the chosen value. It must draw random numbers as stock does.
    forward: Callable[..., Any]
    #: Returns why this module cannot take the op, or "". Must neither change the module nor run it.
    check: Callable[[nn.Module, Any], str] = lambda module, value: ""
    #: Returns why the value asked for is refused, with the remedy, or ""; a reason always ends in an error.
    refuse: Callable[[nn.Module, Any], str] = lambda module, value: ""
    is_implied: bool = False  # not asked for by name: where another tool's forward runs, it is skipped, not an error
    replaces_stock: bool = False  # its nodes keep other tensors than stock's, which a first step counts instead


def is_parametrized(module: nn.Module) -> bool:
    """Return whether each read of a parameter of ``module`` computes it: spectral_norm counts its reads."""
    return "parametrizations" in module._modules


def not_parametrized(module: nn.Module, value: Any) -> str:
    """Return why an op that reads parameters cannot take ``module``, or "": the ``check`` of such ops."""
    return "it is parametrized: reading its weight computes it" if is_parametrized(module) else ""


def autocast_low(x: Any) -> Any:
    """Convert ``x`` as autocast would for a product; done before the product, it is recorded on the tape."""
    if x is None or not is_autocast(x) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward that raises where its result is differentiated, also with a constant incoming gradient.

    PyTorch's own decorator raises only where the incoming gradient requires one. An undefined gradient is passed on as
    such, so forward calls ``ctx.set_materialize_grads(False)``: with zeros, AdamW would decay a parameter.
    """
    inner = of_what_requires_grad(backward)

    @functools.wraps(backward)
    def wrapper(ctx: Any, *dys: Tensor | None) -> Any:
        if all(dy is None for dy in dys):
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled() and not any(dy is not None and dy.requires_grad for dy in dys):
            dys = tuple(None if dy is None else dy.detach().requires_grad_() for dy in dys)
        return inner(ctx, *dys)

    return wrapper
