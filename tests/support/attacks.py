"""A model of one function, trained stock and patched: what an attack has to tell apart."""

import contextlib
import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave import measure_kept, patch
from support.steps import assert_same, gradients

WIDTH = 32


class Attack(nn.Module):
    """``fn(model, x)`` is its forward; ``f``, ``g`` and ``h`` are linears, ``o`` takes three times the width."""

    def __init__(self, fn, **parts):
        super().__init__()
        self.fn = fn
        self.f, self.g, self.h = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(3 * WIDTH, WIDTH)
        for name, part in parts.items():
            if type(part) is Tensor:
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x):
        return self.fn(self, x)


class Block(GradientCheckpointingLayer):
    """A repeated block: ``fn(block, x, *more)``."""

    def __init__(self, fn):
        super().__init__()
        self.fn, self.f = fn, nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *more):
        return self.fn(self, x, *more)


def trained(model, x, steps=2, context=contextlib.nullcontext):
    """Loss, gradients (that of ``x`` too, if it wants one) and buffers of each of a few steps, with no optimizer."""
    found = []
    for number in range(steps):
        model.zero_grad(set_to_none=True)
        leaf = x.detach().clone().requires_grad_(x.requires_grad)
        torch.manual_seed(number)
        with context():
            loss = model(leaf)
            loss = (loss.abs() if loss.is_complex() else loss).float().pow(2).mean()
            loss.backward()
        results = {"loss": loss.detach().clone(), **gradients(model), **flat(leaf.grad, "x.grad")}
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if not buffer.is_complex()}
        found.append({**results, **buffers})
    return found


def flat(found, name=""):
    """The tensors of what a run gave, by name: of dicts and lists, one in the other, and of None nothing."""
    if found is None or isinstance(found, Tensor):
        return {} if found is None else {name: found}
    items = found.items() if isinstance(found, Mapping) else enumerate(found)
    return {key: tensor for place, inner in items for key, tensor in flat(inner, f"{name}.{place}").items()}


def assert_alike(make, run, config=True, of_each=False):
    """``run`` gives the same tensors for a patched and a stock model; ``of_each`` patches each child by itself."""
    found = []
    for is_patched in (True, False):
        torch.manual_seed(0)
        model = make()
        for part in (model.children() if of_each else [model]) if is_patched else ():
            patch(part, config)
        torch.manual_seed(1)
        found.append(flat(run(model)))
    assert_same(*found)


def assert_trains_like_stock(fn, x, context=contextlib.nullcontext, config=True, steps=2, **parts):
    ours, stock = pair(fn, x.device, config, **parts)
    assert_same(*(flat(trained(model, x, steps, context)) for model in (ours, stock)))


def pair(fn, device, config=True, **parts):
    torch.manual_seed(0)
    stock = Attack(fn, **parts).to(device)
    ours = copy.deepcopy(stock)
    if config is not None:
        patch(ours, config)
    return ours, stock


def kept_of(fn, x, **parts):
    """Bytes that the model of ``fn`` keeps: patched, stock."""
    ours, stock = pair(fn, x.device, **parts)
    return measure_kept(ours, x).total, measure_kept(stock, x).total
