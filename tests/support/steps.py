"""One training step of a model, and what it means for two of them to be the same."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_memsave import patch
from hf_memsave.patching.swap import is_patched, stock_class
from support.helpers import assert_same_bits
from support.zoo import batch_for

Results = dict[str, Tensor]


def patched(model: nn.Module, *config: Any, **fields: Any) -> nn.Module:
    """The model, after it was patched."""
    patch(model, *config, **fields)
    return model


def patched_copy(model: nn.Module, *config: Any, **fields: Any) -> nn.Module:
    """A copy of the model that is patched."""
    return patched(copy.deepcopy(model), *config, **fields)


def step(model: nn.Module, batch: Any, seed: int = 7, low: torch.dtype | None = None, **options: Any) -> Results:
    """Loss and gradients of one forward and backward, with dropout drawn from ``seed``; the forward under autocast.

    ``batch`` has the forward's arguments by name, or is its one argument.
    """
    torch.manual_seed(seed)
    with torch.autocast(next(model.parameters()).device.type, low, enabled=low is not None):
        loss = loss_of(model(**batch, **options) if isinstance(batch, Mapping) else model(batch, **options))
    return backward(model, loss)


def backward(model: nn.Module, loss: Tensor, **options: Any) -> Results:
    """Loss and gradients of its backward alone."""
    model.zero_grad(set_to_none=True)
    loss.backward(**options)
    return {"loss": loss.detach().clone(), **gradients(model)}


def loss_of(out: Any) -> Tensor:
    """The loss that a forward gives, or the mean square of the tensor that it gives."""
    return out.float().square().mean() if isinstance(out, Tensor) else out["loss"]


def gradients(model: nn.Module) -> Results:
    """A copy of every gradient, by the parameter's name."""
    return {f"{n}.grad": p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Two results have equal tensors under equal names: bit for bit on CPU.

    CUDA adds in no fixed order: there they are equal up to rounding, which a wrong mask or a missing term is not.
    """
    assert list(got) == list(expected)
    assert any(t.is_floating_point() and t.abs().max() > 0 for t in expected.values()), "nothing was compared"
    for name, tensor in expected.items():
        if not tensor.is_floating_point():
            assert torch.equal(got[name], tensor), name
        elif tensor.is_cuda:
            slack = 1e-3 * (float(tensor.abs().max()) or 1.0)
            torch.testing.assert_close(got[name], tensor, rtol=1e-3, atol=slack, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert_same_bits(got[name], tensor, name)


def state_of(model: nn.Module) -> dict[str, Any]:
    """What patching may touch, module by module: class, config, the attention it names, instance attributes."""
    found = {}
    for name, module in model.named_modules():
        config = module.__dict__.get("config")
        found[name] = (type(module), id(config), getattr(config, "_attn_implementation", None), set(module.__dict__))
    return found


def patched_classes(model: nn.Module) -> dict[str, str]:
    """Path -> name of the stock class, of every module that runs our code."""
    return {name: stock_class(m).__name__ for name, m in model.named_modules() if is_patched(m)}


def with_uneven_vectors(model: nn.Module) -> nn.Module:
    """The model as after some training: no norm's weight is one, no bias zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def train(model, size, steps, padded=False, is_autocast=False):
    """Losses, the first step's gradients, and the trained parameters after some steps of AdamW."""
    torch.manual_seed(3)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), 1e-3)
    losses, first = [], {}
    for number in range(steps):
        with torch.autocast(model.device.type, torch.bfloat16, enabled=is_autocast):
            loss = model(**batch_for(model, size, padded, number)).loss
        loss.backward()
        first = first or gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first, trained


def assert_trains_like(ours, stock, *how, **options):
    """As :func:`train` does, with equal losses, gradients and parameters, to the bit."""
    losses, *found = train(ours, *how, **options)
    stock_losses, *expected = train(stock, *how, **options)
    assert losses == stock_losses
    assert len(set(losses)) > len(losses) // 4  # the run did move
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys() and len(mine) > 3
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
