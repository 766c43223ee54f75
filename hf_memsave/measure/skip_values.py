"""Running a model for its allocations alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_DRAWN = 2**16
# Matrix products, and which argument is the first factor.
_PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten._grouped_mm: 0, aten.addmm: 1, aten.baddbmm: 1}


class SkipValues(TorchDispatchMode):
    """Random weights repeat a few numbers, and matrix products are zeros: no kept byte depends on a value.

    Args:
        shares: Lay large tensors of one shape over the same memory, and leave there what is there: for building a
            model, whose weights do not count.
    """

    def __init__(self, shares: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shared: dict[Any, torch.Tensor] | None = {} if shares else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.empty.memory_format and self.shared is not None:
            return self._shared(func(*args, **(kwargs or {})), self.shared)
        is_drawn = func.overloadpacket in (aten.normal_, aten.uniform_)
        if is_drawn and args[0].numel() > _DRAWN and args[0].is_contiguous():
            if self.shared is not None:
                return args[0]
            few = func(args[0].new_empty(_DRAWN), *args[1:], **(kwargs or {}))
            for part in args[0].view(-1).split(_DRAWN):
                part.copy_(few[: len(part)])
            return args[0]
        if func.overloadpacket in _PRODUCTS:
            left, right = args[_PRODUCTS[func.overloadpacket] :][:2]
            return left.new_zeros(*left.shape[:-1], right.shape[-1])
        return func(*args, **(kwargs or {}))

    def _shared(self, made: torch.Tensor, shared: dict[Any, torch.Tensor]) -> torch.Tensor:
        if made.numel() <= _DRAWN or not made.is_floating_point():
            return made
        known = shared.setdefault((made.shape, made.dtype, made.device), made)
        return made.new_empty(0).set_(known.untyped_storage(), 0, made.shape, made.stride())
