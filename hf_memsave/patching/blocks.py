"""Parts of a model: its repeated blocks, numbered as :attr:`MemSaveConfig.layers` counts them, and its head."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def block_numbers(model: nn.Module) -> dict[str, int]:
    """Path of each outermost repeated block -> its number, in the order in which the model holds them."""
    numbers: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and not ancestors(name) & numbers.keys():
            numbers[name] = len(numbers)
    return numbers


def number_of(name: str, numbers: Mapping[str, int]) -> int:
    """The number of the block at or above the path ``name``; outside every block that of the first, 0."""
    return next((numbers[path] for path in ancestors(name) | {name} if path in numbers), 0)


def is_in_block(name: str, numbers: Mapping[str, int]) -> bool:
    """Whether the path ``name`` is that of a repeated block, or lies in one."""
    return bool((ancestors(name) | {name}) & numbers.keys())


def ancestors(name: str) -> set[str]:
    """The paths of the modules around the one at ``name``."""
    parts = name.split(".")
    return {".".join(parts[:i]) for i in range(len(parts))} - {name}


def head_of(model: nn.Module) -> nn.Module | None:
    """What gives logits over a vocabulary."""
    if not isinstance(model, PreTrainedModel):
        return None
    try:
        head: nn.Module | None = model.get_output_embeddings()
        return head
    except (AttributeError, NotImplementedError):  # some models say that they have one, and do not
        return None
