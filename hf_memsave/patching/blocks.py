"""Parts of a model: its repeated blocks, numbered as :attr:`MemSaveConfig.layers` counts them, and its head."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def block_numbers(model: nn.Module) -> dict[str, int]:
    """Return the path of each outermost repeated block -> its number, in the order of ``named_modules``."""
    numbers: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and block_at(name, numbers) is None:
            numbers[name] = len(numbers)
    return numbers


def block_at(name: str, numbers: Mapping[str, int]) -> int | None:
    """Return the number of the block that is, or is around, the module at path ``name``; None outside every block."""
    parts = name.split(".")
    return next((numbers[path] for i in range(len(parts) + 1) if (path := ".".join(parts[:i])) in numbers), None)


def head_of(model: nn.Module) -> nn.Module | None:
    """Return the module of ``model`` that computes logits over a vocabulary; None if there is none."""
    try:
        head: nn.Module | None = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
        return head
    except (AttributeError, NotImplementedError):  # some models say that they have one, and do not
        return None
