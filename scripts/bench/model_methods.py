"""What ``models.py`` compares: each method takes a model, with its adapters, and gives what is called to train it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import nn

from hf_memsave import MemSaveConfig, patch


def checkpointed(model: nn.Module) -> nn.Module:
    """With Transformers' gradient checkpointing."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()
    return model


def patched(**fields: Any) -> Callable[[nn.Module], nn.Module]:
    """With memsave, so configured."""

    def change(model: nn.Module) -> nn.Module:
        patch(model, MemSaveConfig(**fields))
        return model

    return change


def offloaded(model: nn.Module) -> Callable[..., Any]:
    """Checkpointed, and the blocks' inputs in main memory."""
    model = checkpointed(model)

    def call(**batch: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return model(**batch)

    return call


def compiled(budget: float) -> Callable[[nn.Module], Any]:
    """By torch.compile, whose partitioner may keep such a part of what it would keep."""

    def change(model: nn.Module) -> Any:
        functorch.activation_memory_budget = budget
        return torch.compile(model)

    return change


def liger(model: nn.Module) -> nn.Module:
    """With Liger's kernels, in this instance alone."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model.get_base_model() if hasattr(model, "get_base_model") else model)
    return model


METHODS: dict[str, Callable[[nn.Module], Any]] = {
    "stock": lambda model: model,
    "memsave": patched(),
    "memsave, Triton": patched(backend="auto"),
    "checkpointing": checkpointed,
    "memsave, whole blocks": patched(checkpoint="block"),
    "Liger": liger,
    "memsave, up to the gate": patched(checkpoint="gate"),
    "checkpointing, offload": offloaded,
    "memsave, offload": patched(offload=True),
    "torch.compile, budget 1": compiled(1.0),
    "torch.compile, budget .99": compiled(0.99),
    "memsave, torch.compile": lambda model: torch.compile(patched()(model)),
}
#: What a method needs.
NEEDS = {"Liger": "liger_kernel"}


def is_installed(method: str) -> bool:
    """Whether what a method needs is there."""
    return method not in NEEDS or importlib.util.find_spec(NEEDS[method]) is not None
