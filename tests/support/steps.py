"""One training step of a model, and what it means for two of them to be the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_memsave.patching.swap import is_patched, stock_class
from support.helpers import assert_same_bits

Results = dict[str, Tensor]


def step(model: nn.Module, batch: Mapping[str, Any], seed: int = 7, **options: Any) -> Results:
    """Loss and gradients of one forward and backward, with dropout drawn from ``seed``."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = model(**batch, **options).loss
    loss.backward()
    return {"loss": loss.detach().clone(), **gradients(model)}


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
