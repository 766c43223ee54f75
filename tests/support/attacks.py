"""A model of one function, trained stock and patched: what an attack has to tell apart."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave import measure_kept, patch
from support.steps import Results, assert_same, gradients

WIDTH = 32


class Attack(nn.Module):
    """``fn(model, x)`` is its forward; ``f``, ``g`` and ``h`` are linears, ``o`` takes three times the width."""

    def __init__(self, fn: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.fn = fn
        self.f, self.g, self.h = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(3 * WIDTH, WIDTH)
        for name, part in parts.items():
            if type(part) is Tensor:
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self, x)


class Block(GradientCheckpointingLayer):
    """A repeated block: ``fn(block, x, *more)``."""

    def __init__(self, fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.fn, self.f = fn, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        return self.fn(self, x, *more)


def trained(model: nn.Module, x: Tensor, steps: int = 2, context: Any = contextlib.nullcontext) -> list[Results]:
    """Loss, gradients and buffers of each of a few steps, with no optimizer."""
    found = []
    for number in range(steps):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(number)
        with context():
            loss = model(x)
            loss = (loss.real if loss.is_complex() else loss).float().pow(2).mean()
            loss.backward()
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if not buffer.is_complex()}
        found.append({"loss": loss.detach().clone(), **gradients(model), **buffers})
    return found


def assert_trains_like_stock(
    fn: Callable[[Any, Tensor], Tensor], x: Tensor, context: Any = contextlib.nullcontext, **parts: Any
) -> None:
    """Two steps of the model of ``fn``, patched and stock."""
    torch.manual_seed(0)
    stock = Attack(fn, **parts).to(x.device)
    ours = copy.deepcopy(stock)
    patch(ours)
    pairs = zip(trained(ours, x, context=context), trained(stock, x, context=context), strict=True)
    for got, expected in pairs:
        assert_same(got, expected)


def kept_of(fn: Callable[[Any, Tensor], Tensor], x: Tensor, **parts: Any) -> tuple[int, int]:
    """Bytes that the model of ``fn`` keeps: patched, stock."""
    torch.manual_seed(0)
    stock = Attack(fn, **parts).to(x.device)
    ours = copy.deepcopy(stock)
    patch(ours)
    return measure_kept(ours, x).total, measure_kept(stock, x).total
