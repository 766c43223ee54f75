"""A sum of losses that is not computed yet, as it may be divided next: by the number of tokens in all batches.

Chunks compute gradients in forward, and round them once to the model's dtype. A factor that comes later, in backward,
rounds them again. So the sum that a model's own forward asks for waits for its divisor (``loss / num_items_in_batch``,
as Transformers has it), and gradients are divided before they are rounded, as in stock. Any other function gets the sum
itself, and so does what holds it at the end of the forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_memsave.ops.lazy import TOLD, Lazy, computed
from hf_memsave.ops.op import once_differentiable
from hf_memsave.tape import Tape
from hf_memsave.tape.private import no_subclasses, tree_map

#: Computes the sum, divided.
Compute = Callable[[Any], Tensor]
_DIVIDES = {
    getattr(home, name)
    for name in "div true_divide divide __truediv__".split()
    for home in (torch, Tensor)
    if hasattr(home, name)
}


class LazyLoss(Lazy):
    """A loss ``[]``; see the module.

    Attributes:
        compute: What computes it; None when it is.
    """

    compute: Compute | None
    _sum: Tensor

    @staticmethod
    def of(compute: Compute, dtype: torch.dtype, inputs: Sequence[Tensor], tape: Tape) -> LazyLoss:
        """The loss that ``compute(None)`` gives, of these inputs, in a forward under this tape."""
        lazy: Any = _Later.apply(compute, torch.empty((), dtype=dtype, device="meta"), *inputs)
        lazy.compute = compute
        there = weakref.ref(lazy)
        tape.at_end.append(lambda: computed(there()))
        return lazy

    def computed(self) -> Tensor:
        """The sum."""
        if self.compute is not None:
            with torch.inference_mode(False), torch.enable_grad():
                self._sum = self.compute(None)
            self.compute = None
        return self._sum

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self = args[0] if args else None
        if isinstance(self, LazyLoss) and self.compute is not None:
            is_plain = func in _DIVIDES and len(args) == 2 and not kwargs and torch.is_grad_enabled()
            if is_plain and _is_divisor(args[1], self.dtype):
                return self.compute(args[1])
            if func in TOLD:
                with no_subclasses():
                    return func(*args, **kwargs)
        args, kwargs = tree_map(computed, (args, kwargs))
        return func(*args, **kwargs)


def _is_divisor(value: Any, dtype: torch.dtype) -> bool:
    """Whether a number, or a tensor of one, that wants no gradient and leaves the dtype."""
    if isinstance(value, Tensor):
        is_number = value.dim() == 0 and not value.requires_grad and type(value) is Tensor
        return is_number and torch.promote_types(value.dtype, dtype) == dtype
    return isinstance(value, (int, float))


class _Later(torch.autograd.Function):
    """The place of the sum in the graph, for what knows no tensor subclass."""

    @staticmethod
    def forward(ctx: Any, compute: Compute, like: Tensor, *inputs: Tensor) -> Tensor:
        ctx.compute, ctx.inputs = compute, inputs  # which ``compute`` holds in any case, and keeps as it is called
        loss: Tensor = LazyLoss.empty(like, inputs[0].device)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        wanted = [tensor for tensor in ctx.inputs if tensor.requires_grad]
        with torch.enable_grad():
            loss = ctx.compute(None)
        found = iter(torch.autograd.grad(loss, wanted, dy.to(loss.dtype), allow_unused=True))
        return None, None, *(next(found) if tensor.requires_grad else None for tensor in ctx.inputs)
