"""Gradients of a head's parameters, summed over chunks of its rows as if there were no chunks.

Autograd rounds a chunk's gradient to the parameter's dtype, and in bf16 a sum of rounded parts is further from the
truth than one rounded sum. So :class:`Sums` is a function mode, under which each linear adds its product to a sum in
fp32 and gives autograd none. Parameters that are used in another way get autograd's gradients, added in fp32.

A sum of a head's size is read and written for each product, so products wait for each other. Of a weight ``[V, H]`` and
T rows, in bytes an element of V::

    4 H             the sum
    2 T             dy of all rows, in bf16: where that is less there is no sum, but one product, as in stock
    4 H + H         a sum, and dy of as many rows as take a quarter of that, otherwise

Where dy takes less than the gradient, backward computes the product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_memsave.device import has_wide_products, is_autocast
from hf_memsave.ops.loss.wide_product import add_product, wide_product
from hf_memsave.tape.private import FakeTensor, all_subclasses, innermost_hooks, no_modes, stands_for_many

#: Elements of a sum to which a product is added at once.
_BLOCK = 2**24


class Sums(TorchFunctionMode):
    """Sums of gradients over chunks.

    Args:
        parameters: Those that want one.
        wide: The dtype of the sums, unless a parameter's is wider.
        count: Rows of all chunks.
    """

    def __init__(self, parameters: Sequence[Tensor], wide: torch.dtype, count: int) -> None:
        super().__init__()
        self.parameters, self.wide, self.count = parameters, wide, count
        self.ids = {id(parameter) for parameter in parameters}
        self.sums: dict[int, Tensor] = {}
        self.lost: dict[int, Tensor] = {}
        self.waiting: dict[int, tuple[Tensor, list[Tensor]]] = {}  # a buffer with dy, and the parts of x
        self.hooks: Any = None
        self.casts: dict[tuple[int, torch.dtype], Tensor] = {}

    @contextlib.contextmanager
    def of_linears(self, module: nn.Module) -> Iterator[None]:
        """Where ``module`` computes a chunk; what is compiled in it would trace this mode, and is left to autograd."""
        if any(m._compiled_call_impl for m in module.modules()):
            yield
            return
        self.hooks = innermost_hooks()
        with all_subclasses(), self:  # modes too
            yield

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with no_modes():
            return (self._linear if func is F.linear else func)(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        wanted = [tensor for tensor in (weight, bias) if tensor is not None and tensor.requires_grad]
        is_ours = bool(wanted) and all(id(tensor) in self.ids for tensor in wanted)
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
        out: Tensor = _Linear.apply(x, weight, bias, low, self)
        return out

    def add(self, parameter: Tensor, part: Tensor | None) -> None:
        """Add a part of a parameter's gradient."""
        if part is not None:
            self._of(parameter).add_(part)

    def add_compensated(self, parameter: Tensor, part: Tensor) -> None:
        """Add a part, and next time what rounding took from it (Kahan, 1965)."""
        total = self._of(parameter)
        part = part - self.lost.get(id(parameter), 0)
        after = total + part
        self.lost[id(parameter)] = (after - total).sub_(part)
        total.copy_(after)

    def add_product(self, parameter: Tensor, dy: Tensor, x: Tensor) -> None:
        """Add ``dy^T x`` of ``[rows, V]`` and ``[rows, H]`` to a weight's gradient, now or later."""
        if id(parameter) not in self.waiting:
            of_sum, of_row = parameter.numel() * self.wide.itemsize, dy.shape[1] * dy.itemsize
            place = self.count if self.count * of_row <= of_sum else of_sum // 4 // of_row
            self.waiting[id(parameter)] = dy.new_empty(place if place > len(dy) else 0, dy.shape[1]), []
            if place < self.count:
                self._of(parameter)  # at once: where nothing has numbers, two chunks tell the bytes of all
        buffer, xs = self.waiting[id(parameter)]
        if xs and _length(xs) + len(dy) > len(buffer):
            _add_product(self._of(parameter), buffer[: _length(xs)], *xs)
            xs.clear()
        start = _length(xs)
        if start + len(dy) > len(buffer) or dy.dtype != buffer.dtype:
            _add_product(self._of(parameter), dy, x)
        else:
            buffer[start : start + len(dy)] = dy
            xs.append(x)

    def kept(self) -> list[tuple[Tensor, ...]]:
        """Of each parameter, what :func:`gradient` computes its gradient of; nothing where no chunk has used it."""
        return [self._kept(parameter) for parameter in self.parameters]

    def _kept(self, parameter: Tensor) -> tuple[Tensor, ...]:
        buffer, xs = self.waiting.pop(id(parameter), (parameter, []))
        total, dy = self.sums.pop(id(parameter), None), buffer[: _length(xs)]
        if total is None and xs:
            return (dy, *xs) if buffer.nbytes <= parameter.nbytes else (_product((dy, *xs), parameter.dtype),)
        if total is None:
            return ()
        if xs:
            _add_product(total, dy, *xs)
        del buffer, dy  # what is rounded takes their place
        return (total.to(parameter.dtype),)

    def _of(self, parameter: Tensor) -> Tensor:
        if id(parameter) not in self.sums:
            dtype = torch.promote_types(parameter.dtype, self.wide)
            self.sums[id(parameter)] = torch.zeros_like(parameter, dtype=dtype)
        return self.sums[id(parameter)]


class _Linear(torch.autograd.Function):
    """A linear by ``low``, a weight in the dtype of x; gradients of its parameters go to ``sums``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor, sums: Sums) -> Tensor:
        ctx.save_for_backward(x, low)
        ctx.parameters, ctx.sums = (weight, bias), sums
        return F.linear(x, low, bias if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, low = ctx.saved_tensors
        (weight, bias), sums = ctx.parameters, ctx.sums
        rows = dy.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            sums.add_product(weight, rows, x.detach().flatten(0, -2))
        if ctx.needs_input_grad[2]:
            sums.add_compensated(bias, rows.sum(0, dtype=sums.wide).sum_to_size(bias.shape))
        return dy @ low if ctx.needs_input_grad[0] else None, None, None, None, None


def gradient(kept: Sequence[Tensor], factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """What :meth:`Sums.kept` gave of a parameter of this dtype, times a number in the dtype of sums."""
    if not kept:
        return None
    whole = kept[0] if len(kept) == 1 else _product(kept, dtype)
    if len(kept) == 1 or stands_for_many(factor):
        return (whole * factor).to(dtype)
    return whole.mul_(factor)


def _product(rows: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """``dy^T x`` of ``[T, V]`` and the parts of ``[T, H]``."""
    return wide_product(rows[0].t(), _joined(rows[1:]), dtype)


def _add_product(total: Tensor, dy: Tensor, *xs: Tensor) -> None:
    """``total += dy^T x``, some rows of the total at a time."""
    is_wide = dy.dtype != total.dtype and has_wide_products(dy)
    x = _joined(xs) if is_wide else _joined(xs).to(total.dtype)
    step = max(1, _BLOCK // total.shape[1])
    for block, part in zip(total.split(step), dy.t().split(step), strict=True):
        if is_wide:
            add_product(block, part, x)
        else:
            block.addmm_(part.to(total.dtype), x)


def _length(xs: Sequence[Tensor]) -> int:
    return sum(map(len, xs))


def _joined(xs: Sequence[Tensor]) -> Tensor:
    return xs[0] if len(xs) == 1 else torch.cat(list(xs))
