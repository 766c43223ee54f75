"""The most bytes alive at once in a step, counted op by op: a peak without a GPU's allocator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Live(TorchDispatchMode):
    """Knows the storages that ops have made and that are alive, and the most that they came to."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage())._cdata not in given:
                self.made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.made = {key: entry for key, entry in self.made.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.made.values()))
        return output


def measure_peak(model: nn.Module, batch: Mapping[str, Any]) -> int:
    """Bytes at the peak of one forward and backward, beyond parameters, their gradients and the batch.

    Gradients are there before, as when they are accumulated. What a kernel allocates for itself is not seen.

    Returns:
        The sum over all storages, at the op where it is largest.
    """
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    with _Live() as live:
        model(**batch).loss.backward()
    return live.peak
