"""Gradients of a head's parameters, summed over chunks of its rows as if there were no chunks.

Autograd rounds a chunk's gradient to the parameter's dtype, and in bf16 a sum of rounded parts is further from the
truth than one rounded sum. So under :class:`Sums`, a function mode, each linear adds its product to a sum in fp32 and
gives autograd none. Parameters that are used in another way get autograd's gradients, added in fp32.

A sum of a head's size is read and written for each product, so products wait for each other. Of a weight ``[V, H]`` and
T rows, in bytes an element of V::

    2 T             dy of all rows, in bf16: where that is less than a sum, one product, as in stock
    4 H + H         otherwise: a sum, and dy of as many rows as take a quarter of it

Where dy takes less than the gradient, backward computes the product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_memsave.device import add_product, has_wide_products, is_autocast, wide_product
from hf_memsave.tape.private import FakeTensor, all_subclasses, innermost_hooks, no_modes, stands_for_many

#: Elements of a sum to which a product is added at once.
_BLOCK = 2**24


class Sum:
    """The gradient of a parameter, summed over chunks of ``count`` rows in all, in ``dtype``."""

    def __init__(self, parameter: Tensor, dtype: torch.dtype, count: int) -> None:
        self.parameter, self.dtype, self.count = parameter, dtype, count
        self._total: Tensor | None = None
        self._lost: Tensor | float = 0.0
        self._dy: Tensor | None = None  # a buffer for rows of dy that wait for their product with those of x
        self._xs: list[Tensor] = []

    def total(self) -> Tensor:
        """Return the sum, allocated when it is first needed."""
        if self._total is None:
            self._total = torch.zeros_like(self.parameter, dtype=self.dtype)
        return self._total

    def add_compensated(self, part: Tensor) -> None:
        """Add a part, and next time what rounding took from it (Kahan, 1965)."""
        total, part = self.total(), part - self._lost
        after = total + part
        self._lost = (after - total).sub_(part)
        total.copy_(after)

    def add_product(self, dy: Tensor, x: Tensor) -> None:
        """Add ``dy^T x`` of ``[rows, V]`` and ``[rows, H]`` to a weight's gradient, now or later."""
        if self._dy is None:
            of_sum, of_row = self.parameter.numel() * self.dtype.itemsize, dy.shape[1] * dy.itemsize
            place = self.count if self.count * of_row <= of_sum else of_sum // 4 // of_row
            self._dy = dy.new_empty(place if place > len(dy) else 0, dy.shape[1])
            if place < self.count:
                self.total()  # at once: where nothing has numbers, two chunks tell the bytes of all
        start = sum(map(len, self._xs))
        if self._xs and start + len(dy) > len(self._dy):
            _add_product(self.total(), self._dy[:start], *self._xs)
            self._xs, start = [], 0
        if start + len(dy) > len(self._dy) or dy.dtype != self._dy.dtype:
            _add_product(self.total(), dy, x)
        else:
            self._dy[start : start + len(dy)] = dy
            self._xs.append(x)

    def kept(self) -> tuple[Tensor, ...]:
        """Hand over the tensors that :func:`gradient` takes; none where no chunk used the parameter."""
        total, dy, xs, dtype = self._total, self._dy, self._xs, self.parameter.dtype
        self._total, self._dy, self._xs = None, None, []
        if dy is not None and xs:
            rows = dy[: sum(map(len, xs))]
            if total is None:
                is_less = dy.nbytes <= self.parameter.nbytes
                return (rows, *xs) if is_less else (wide_product(rows.t(), _joined(xs), dtype),)
            _add_product(total, rows, *xs)
            del rows
        del dy  # what is rounded takes its place
        return () if total is None else (total.to(dtype),)


class Sums(TorchFunctionMode):
    """The sums of some parameters, to which linears add: in ``wide``, or the parameter's dtype, if that is wider."""

    def __init__(self, parameters: Sequence[Tensor], wide: torch.dtype, count: int) -> None:
        super().__init__()
        self.of = {id(p): Sum(p, torch.promote_types(p.dtype, wide), count) for p in parameters}
        self.hooks: Any = None
        self.casts: dict[tuple[int, torch.dtype], Tensor] = {}

    @contextlib.contextmanager
    def of_linears(self, module: nn.Module) -> Iterator[None]:
        """Enter this mode while ``module`` computes a chunk; not if it is compiled, as it would trace the mode."""
        if any(m._compiled_call_impl for m in module.modules()):
            yield
            return
        self.hooks = innermost_hooks()
        with all_subclasses(), self:  # modes too
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with no_modes():
            return (self._linear if func is F.linear else func)(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        wanted = [tensor for tensor in (weight, bias) if tensor is not None and tensor.requires_grad]
        is_ours = bool(wanted) and all(id(tensor) in self.of for tensor in wanted)
        is_plain = {type(input), type(weight)} <= {Tensor, nn.Parameter, FakeTensor} and input.dim() > 1
        is_again = innermost_hooks() != self.hooks  # a checkpoint within the head: run again, it knows no sums
        if not (is_ours and is_plain and torch.is_grad_enabled()) or is_again:
            return F.linear(input, weight, bias)
        x = input
        if is_autocast(x) and torch.float64 not in (x.dtype, weight.dtype):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        elif x.dtype != weight.dtype:  # which is refused
            return F.linear(input, weight, bias)
        low = self.casts.get((id(weight), x.dtype))
        if low is None:
            low = weight.detach().to(x.dtype)
        if weight.requires_grad:  # one for all chunks; another weight may be made for each
            self.casts[id(weight), x.dtype] = low
        return _LinearToSums.apply(x, weight, bias, low, self.of)


class _LinearToSums(torch.autograd.Function):
    """A linear by ``low``, a weight in the dtype of x; gradients of its parameters go to ``sums``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor, sums: dict[int, Sum]) -> Tensor:
        ctx.save_for_backward(x, low)
        ctx.parameters, ctx.sums = (weight, bias), sums
        return F.linear(x, low, bias if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, low = ctx.saved_tensors
        (weight, bias), sums = ctx.parameters, ctx.sums
        rows = dy.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            sums[id(weight)].add_product(rows, x.detach().flatten(0, -2))
        if ctx.needs_input_grad[2]:
            of_bias = sums[id(bias)]
            of_bias.add_compensated(rows.sum(0, dtype=of_bias.dtype).sum_to_size(bias.shape))
        return dy @ low if ctx.needs_input_grad[0] else None, None, None, None, None


def gradient(kept: Sequence[Tensor], factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Compute a gradient in ``dtype``, times ``factor``, of what :meth:`Sum.kept` returned; None if that is empty."""
    if not kept:
        return None
    whole = kept[0] if len(kept) == 1 else wide_product(kept[0].t(), _joined(kept[1:]), dtype)
    if len(kept) == 1 or stands_for_many(factor):
        return (whole * factor).to(dtype)
    return whole.mul_(factor)


def _add_product(total: Tensor, dy: Tensor, *xs: Tensor) -> None:
    """Compute ``total += dy^T x``, some rows of the total at a time."""
    is_wide = dy.dtype != total.dtype and has_wide_products(dy)
    x = _joined(xs) if is_wide else _joined(xs).to(total.dtype)
    step = max(1, _BLOCK // total.shape[1])
    for block, part in zip(total.split(step), dy.t().split(step), strict=True):
        if is_wide:
            add_product(block, part, x)
        else:
            block.addmm_(part.to(total.dtype), x)


def _joined(xs: Sequence[Tensor]) -> Tensor:
    return xs[0] if len(xs) == 1 else torch.cat(list(xs))
