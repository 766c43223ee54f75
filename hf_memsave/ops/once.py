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
    def wrapper(ctx: Any, dy: Tensor | None) -> Any:
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled() and not dy.requires_grad:
            dy = dy.detach().requires_grad_()
        return inner(ctx, dy)

    return wrapper
