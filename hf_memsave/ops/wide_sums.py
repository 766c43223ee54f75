"""Gradients of parameters that several calls share, summed in fp32 over the calls.

Autograd rounds the gradient of a bf16 weight in each call, before anybody can add it up. That of a linear is a product,
dW = dy^T x, which can be added as fp32 to the sum: a weight that linears alone take gets it so, and any other its
rounded parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_memsave.device import has_wide_products
from hf_memsave.tape.private import no_modes

#: Elements of a sum that a product is computed for at once, where it cannot be added in place.
_BLOCK = 2**24


class WideSums(TorchFunctionMode):
    """Watches the linears that are called in it, and keeps other modes from seeing anything.

    Args:
        parameters: Whose gradients are summed.
        wide: The dtype of sums, unless a parameter's is wider.
    """

    def __init__(self, parameters: Sequence[Tensor], wide: torch.dtype) -> None:
        super().__init__()
        self.parameters = parameters
        self.sums = {id(p): torch.zeros_like(p, dtype=torch.promote_types(p.dtype, wide)) for p in parameters}
        self._lost: dict[int, Tensor] = {}
        self._calls: Counter[int] = Counter()
        self._by_product: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with no_modes():
            found = func(*args, **(kwargs or {}))
            if func is F.linear and type(found) is Tensor and found.requires_grad:
                self._watch(found, *args, **(kwargs or {}))
        return found

    def _watch(self, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        keys = [id(parameter) for parameter in (weight, bias) if id(parameter) in self.sums]
        self._calls.update(keys)
        if keys:
            y.register_hook(partial(self._add, id(weight), id(bias), x.detach().flatten(0, -2)))

    def _add(self, weight: int, bias: int, x: Tensor, dy: Tensor) -> None:
        dy = dy.flatten(0, -2)
        if weight in self._by_product:
            _add_product(self.sums[weight], dy, x)
        if bias in self._by_product:
            total = self.sums[bias]
            lost = self._lost.setdefault(bias, torch.zeros_like(total))
            _add_compensated(total, lost, dy.sum(0, dtype=total.dtype))

    def backward(self, y: Tensor, x: Tensor, dy: Tensor) -> Tensor | None:
        """Adds what the parameters get from ``y``, computed from ``x`` in this context, by its gradient ``dy``.

        Returns:
            The gradient of ``x``.
        """
        uses = _uses(y)
        self._by_product = {key for key, n in self._calls.items() if uses[key] == n}  # or another function takes it too
        others = [p for p in self.parameters if id(p) not in self._by_product]
        dx, *found = torch.autograd.grad(y, [x, *others], dy, allow_unused=True)
        for parameter, gradient in zip(others, found, strict=True):
            if gradient is not None:
                self.sums[id(parameter)] += gradient
        self._calls.clear()
        return dx

    def rounded(self) -> list[Tensor]:
        """The sums, in their parameters' dtypes."""
        return [self.sums.pop(id(p)).to(p.dtype) for p in self.parameters]


def _uses(y: Tensor) -> Counter[int]:
    """How often each leaf is taken by the functions that made ``y``."""
    found: Counter[int] = Counter()
    todo, seen = [y.grad_fn], set()
    while todo:
        node = todo.pop()
        for after, _ in () if node is None else node.next_functions:
            if hasattr(after, "variable"):
                found[id(after.variable)] += 1
            elif after not in seen:
                seen.add(after)
                todo.append(after)
    return found


def _add_product(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """``total += dy^T x``, for ``[T, V]`` and ``[T, H]``."""
    x = x.to(dy.dtype)  # as autocast does
    if dy.dtype == total.dtype or not has_wide_products(dy):
        total.addmm_(dy.to(total.dtype).t(), x.to(total.dtype))
        return
    step = max(1, _BLOCK // x.shape[1])
    for rows, part in zip(total.split(step), dy.t().split(step), strict=True):
        rows += torch.mm(part, x, out_dtype=total.dtype)


def _add_compensated(total: Tensor, lost: Tensor, part: Tensor) -> None:
    """``total += part``, and what rounding takes from it into ``lost``, for the next time (Kahan, 1965)."""
    part = part - lost
    after = total + part
    torch.sub(after - total, part, out=lost)
    total.copy_(after)
