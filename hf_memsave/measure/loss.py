"""The loss in what a model returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hf_memsave.errors import MeasureError


def loss_of(output: Any, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The loss that backward begins at: ``output["loss"]``, or ``output``; model and batch are named in errors.

    Returns:
        One number, which requires a gradient.

    Raises:
        MeasureError: There is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        remedy = "Use a model with a head that takes them" if "labels" in batch else "Add 'labels' to the batch"
        raise MeasureError(
            f"expected a loss in the output of {type(model).__name__}, got {_described(output, loss)} for a batch of "
            f"{', '.join(batch)}. {remedy}, or have its forward return a loss of one number."
        )
    if not loss.requires_grad:
        raise MeasureError(
            f"expected a loss that depends on parameters of {type(model).__name__} that require a gradient, got one "
            "that needs none. Unfreeze some."
        )
    return loss


def _described(output: Any, loss: Any) -> str:
    if isinstance(loss, Tensor):
        return f"a tensor {list(loss.shape)}"
    return ", ".join(output) if isinstance(output, Mapping) else f"a {type(output).__name__}"
