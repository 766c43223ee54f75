"""Backwards of the ops: they pass an undefined gradient on, and raise where their result is differentiated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable as of_what_requires_grad


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's own decorator raises only where the incoming gradient itself requires one.

    Forward calls ``ctx.set_materialize_grads(False)``: zeros instead of an undefined gradient would give a parameter a
    gradient that it does not have in stock, by which AdamW decays it.

    Returns:
        ``backward``, whose result also depends on the op's input: with a constant gradient, as that of a sum, PyTorch's
        would leave the second derivative out without a word. Of an undefined gradient it makes undefined ones.
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
