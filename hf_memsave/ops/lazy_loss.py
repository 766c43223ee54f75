"""A sum of losses that nobody has computed yet, as it may be divided next: by the number of tokens in all batches.

Chunks compute gradients in forward, and round them once to the model's dtype. A factor that comes later, in backward,
rounds them again. So the sum waits for its divisor (``loss / num_items_in_batch``, as Transformers does), and gradients
are divided before they are rounded, as in stock. Any other function gets the sum itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_memsave.ops.once import once_differentiable
from hf_memsave.tape.private import no_subclasses, tree_map

#: Computes the sum, divided.
Compute = Callable[[Any], Tensor]
_DIVIDES = {
    getattr(home, name)
    for name in "div true_divide divide __truediv__".split()
    for home in (torch, Tensor)
    if hasattr(home, name)
}


class LazyLoss(Tensor):
    """A loss ``[]``; see the module.

    Attributes:
        compute: What computes it.
        quotient: What it was divided by, and the result.
    """

    compute: Compute
    quotient: tuple[Tensor, Any] | None
    _real: Tensor | None

    @staticmethod
    def of(compute: Compute, dtype: torch.dtype, inputs: Sequence[Tensor]) -> LazyLoss:
        """The loss that ``compute(None)`` gives, of these inputs."""
        lazy: Any = _Later.apply(compute, dtype, *inputs)
        lazy.compute, lazy.quotient, lazy._real = compute, None, None
        return lazy

    def real(self) -> Tensor:
        """The sum."""
        if self._real is None:
            with torch.enable_grad():
                self._real = self.compute(None) if self.quotient is None else self.quotient[0] * self.quotient[1]
        return self._real

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self = args[0] if args else None
        if isinstance(self, LazyLoss) and self._real is None and self.quotient is None:
            if func in _DIVIDES and len(args) == 2 and not kwargs and _is_divisor(args[1], self.dtype):
                self.quotient = self.compute(args[1]), args[1]
                return self.quotient[0]
            if getattr(func, "__name__", "") == "__get__" or func is Tensor.dim:  # of its dtype, its grad_fn, ...
                with no_subclasses():
                    return func(*args, **kwargs)
        args, kwargs = tree_map(_real, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.detach.default:  # which autograd does to what a function returns
            return _empty(args[0].dtype, args[0].device)
        args, kwargs = tree_map(_real, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self.real())


def _real(argument: Any) -> Any:
    return argument.real() if isinstance(argument, LazyLoss) else argument


def _is_divisor(value: Any, dtype: torch.dtype) -> bool:
    """Whether a number, or a tensor of one, that wants no gradient and leaves the dtype."""
    if isinstance(value, Tensor):
        is_number = value.dim() == 0 and not value.requires_grad and type(value) is Tensor
        return is_number and torch.promote_types(value.dtype, dtype) == dtype
    return isinstance(value, (int, float))


class _Later(torch.autograd.Function):
    """The place of the sum in the graph, for what knows no tensor subclass."""

    @staticmethod
    def forward(ctx: Any, compute: Compute, dtype: torch.dtype, *inputs: Tensor) -> Tensor:
        ctx.compute, ctx.inputs = compute, inputs
        return _empty(dtype, inputs[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        wanted = [tensor for tensor in ctx.inputs if tensor.requires_grad]
        with torch.enable_grad():
            loss = ctx.compute(None)
        found = iter(torch.autograd.grad(loss, wanted, dy.to(loss.dtype), allow_unused=True))
        return None, None, *(next(found) if tensor.requires_grad else None for tensor in ctx.inputs)


def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    make: Any = Tensor._make_wrapper_subclass
    return make(LazyLoss, (), dtype=dtype, device=device)
