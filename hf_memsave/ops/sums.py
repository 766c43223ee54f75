"""Gradients of a head's parameters, summed over chunks of its rows as if there were no chunks.

Autograd rounds the gradient that it gives for a chunk to the parameter's dtype, and in bf16 a sum of rounded parts is
further from the truth than one rounded sum. A linear's gradient is the product of what goes in and the gradient of what
comes out: where the graph of a chunk says that a parameter takes part in one linear and nowhere else, that product is
added in fp32. Hooks on parameters wait for the whole gradient.

A sum of a head's size is read and written for each product, so products wait for each other. Of a weight ``[V, H]`` and
T rows, in bytes an element of V::

    4 H             the sum
    2 T             dy of all rows, in bf16: where that is less there is no sum, but one product, as in stock
    4 H + H         a sum, and dy of as many rows as take a quarter of that, otherwise

Where dy takes less than the gradient, backward computes the product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_memsave.device import has_numbers, has_wide_products, waits
from hf_memsave.ops.uses import linears_of
from hf_memsave.ops.wide_product import wide_product
from hf_memsave.tape.private import no_autocast, stands_for_many, without_hooks

#: Elements of a gradient for which a product is computed at once, where it is converted.
_BLOCK = 2**24


class Rows:
    """Gradients whose product is not computed yet.

    Args:
        dy: ``[rows, V]``, the first of them.
        count: How many there is place for.
    """

    def __init__(self, dy: Tensor, count: int) -> None:
        self.dy, self.count = dy.new_empty(count, dy.shape[1]), 0
        self.xs: list[Tensor] = []

    def take(self, dy: Tensor, x: Tensor) -> bool:
        """Take some more, if there is place for them: a copy of dy, and x itself, often rows of what is kept anyway."""
        after = self.count + len(dy)
        if after > len(self.dy) or dy.dtype != self.dy.dtype:
            return False
        self.dy[self.count : after] = dy
        self.xs.append(x)
        self.count = after
        return True

    def taken(self) -> tuple[Tensor, ...]:
        """Dy of all that it has, and the parts of x; there is place for new ones."""
        count, xs, self.count, self.xs = self.count, self.xs, 0, []
        return self.dy[:count], *xs


class Sums:
    """Sums of gradients over chunks.

    Args:
        parameters: Those that want one.
        wide: The dtype of the sums, unless a parameter's is wider.
        count: Rows of all chunks.
    """

    def __init__(self, parameters: Sequence[Tensor], wide: torch.dtype, count: int) -> None:
        self.parameters, self.wide, self.count = parameters, wide, count
        self.sums: dict[int, Tensor] = {}
        self.lost: dict[int, Tensor] = {}
        self.rows: dict[int, Rows] = {}

    def add(self, y: Tensor, x: Tensor, dy: Tensor) -> Tensor | None:
        """Add what a chunk gives them.

        Args:
            y: Of a chunk, with a graph of its own.
            x: The leaf that it is computed from.
            dy: The gradient of y.

        Returns:
            The gradient of x.

        Raises:
            PatchError: What y is computed from is neither x nor a parameter.
        """
        linears = linears_of(y, x, self.parameters)
        others = [parameter for parameter in self.parameters if id(parameter) not in linears]
        dys: dict[int, Tensor | None] = {}
        hooks = [
            node.register_prehook(lambda given, key=key: dys.update({key: given[0]}))
            for key, (node, _) in linears.items()
        ]
        try:
            with without_hooks(others), no_autocast():  # as outside of the forward, where stock's backward runs
                dx, *found = torch.autograd.grad(y, [x, *others], dy, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        for parameter, gradient in zip(others, found, strict=True):
            if gradient is not None:
                self._of(parameter).add_(gradient)
        for parameter in self.parameters:
            if id(parameter) in linears:
                self._add_linear(parameter, linears[id(parameter)].input, dys.get(id(parameter)))
        return dx

    def kept(self) -> list[tuple[Tensor, ...]]:
        """Of each parameter, what :func:`gradient` computes its gradient of; nothing where no chunk has used it."""
        return [self._kept(parameter) for parameter in self.parameters]

    def _kept(self, parameter: Tensor) -> tuple[Tensor, ...]:
        rows, total = self.rows.pop(id(parameter), None), self.sums.pop(id(parameter), None)
        if rows is not None and total is None:
            few = rows.taken()
            is_less = rows.dy.nbytes <= parameter.nbytes
            return few if is_less else (product(few, parameter.dtype, self.wide),)
        if total is None:
            return ()
        if rows is not None:
            _add_product(total, *_both(rows.taken()))
            del rows  # what is rounded takes their place
        return (total.to(parameter.dtype),)

    def _add_linear(self, parameter: Tensor, x: Tensor | None, dy: Tensor | None) -> None:
        if dy is None:
            return
        if x is None:
            total = self._of(parameter)
            lost = self.lost.setdefault(id(parameter), torch.zeros_like(total))
            _add_compensated(total, lost, dy.sum(0, dtype=total.dtype))
            return
        rows = self.rows.get(id(parameter))
        if rows is None and (count := self._place(parameter, dy)) > len(dy):
            rows = self.rows[id(parameter)] = Rows(dy, count)
            if count < self.count:
                self._of(parameter)
        if rows is not None and rows.take(dy, x):
            return
        total = self._of(parameter)
        if rows is not None and rows.count:
            _add_product(total, *_both(rows.taken()))
            if rows.take(dy, x):
                return
        _add_product(total, dy, x)

    def _place(self, parameter: Tensor, dy: Tensor) -> int:
        """For how many rows of dy there is place."""
        of_sum, of_row = parameter.numel() * self.wide.itemsize, dy.shape[1] * dy.itemsize
        return self.count if self.count * of_row <= of_sum else of_sum // 4 // of_row

    def _of(self, parameter: Tensor) -> Tensor:
        if id(parameter) not in self.sums:
            dtype = torch.promote_types(parameter.dtype, self.wide)
            self.sums[id(parameter)] = torch.zeros_like(parameter, dtype=dtype)
        return self.sums[id(parameter)]


def gradient(kept: Sequence[Tensor], factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """What :meth:`Sums.kept` gave of a parameter of this dtype, times a number in the dtype of sums."""
    if not kept:
        return None
    if len(kept) == 1:
        return (kept[0] * factor).to(dtype)
    if stands_for_many(factor):
        return (product(kept, dtype, factor.dtype) * factor).to(dtype)
    return product(kept, dtype, factor.dtype, factor)


def product(rows: Sequence[Tensor], dtype: torch.dtype, wide: torch.dtype, factor: Tensor | None = None) -> Tensor:
    """``factor dy^T x`` in ``dtype``, of ``[T, V]`` and the parts of ``[T, H]``: in ``wide``, and rounded once."""
    dy, x = _both(rows)
    wide = torch.promote_types(dtype, wide)
    if factor is not None and _is_one(factor):
        factor = None
    if dtype == wide or (dtype == dy.dtype and factor is None):
        out = wide_product(dy.t(), x, dtype)
        return out if factor is None else out.mul_(factor)
    out = x.new_empty(dy.shape[1], x.shape[1], dtype=dtype)
    for block, part in _blocks(out, dy):
        torch.mul(wide_product(part, x, wide), 1.0 if factor is None else factor, out=block)
    return out


def _both(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    dy, *xs = rows
    return dy, xs[0] if len(xs) == 1 else torch.cat(xs)


def _is_one(factor: Tensor) -> bool:
    """Where that can be asked without waiting for a device."""
    return has_numbers(factor) and not waits(factor) and bool(factor == 1)


def _add_product(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """``total += dy^T x``, for ``[T, V]`` and ``[T, H]``."""
    if dy.dtype == total.dtype:
        total.addmm_(dy.t(), x)
    elif total.dtype == torch.float32 and has_wide_products(dy):
        for rows, part in _blocks(total, dy):
            rows += torch.mm(part, x, out_dtype=total.dtype)
    else:
        x = x.to(total.dtype)
        for rows, part in _blocks(total, dy):
            rows.addmm_(part.to(total.dtype), x)


def _blocks(out: Tensor, dy: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows of the product at a time, and those of the transposed dy."""
    step = max(1, _BLOCK // out.shape[1])
    return zip(out.split(step), dy.t().split(step), strict=True)


def _add_compensated(total: Tensor, lost: Tensor, part: Tensor) -> None:
    """``total += part``, and what rounding takes from it into ``lost``, for the next time (Kahan, 1965)."""
    part = part - lost
    after = total + part
    torch.sub(after - total, part, out=lost)
    total.copy_(after)
