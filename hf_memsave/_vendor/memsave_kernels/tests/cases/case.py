"""One function of the package, beside PyTorch's own and what both should have computed."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Make = Callable[..., Tensor]


class Case(NamedTuple):
    """What the tests of every kernel need to know of one function.

    Attributes:
        name: Of the test.
        inputs: Called with ``make(*shape, dtype=…)``, rows and columns; returns the arguments of the next two.
        ours: Returns outputs and gradients.
        eager: Called with ``wide`` and the arguments: the same in PyTorch, ``wide`` being its dtype of statistics.
        bytes_per_element: Of each launch in half precision: what the ideal kernel moves, by the kernel's name.
        dtypes: That it is tested in.
        roundings: How many more than PyTorch ours may make: 1 for another order, more for a sum of parts.
    """

    name: str
    inputs: Callable[[Make, int, int], tuple[Any, ...]]
    ours: Callable[..., tuple[Tensor, ...]]
    eager: Callable[..., tuple[Tensor, ...]]
    bytes_per_element: Mapping[str, float]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    roundings: int = 1

    def __str__(self) -> str:
        return self.name


def maker(dtype: torch.dtype, seed: int = 0) -> Make:
    """Makes random tensors in ``dtype``, unless told otherwise."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int, dtype: torch.dtype = dtype, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(DEVICE, dtype)

    return make


def gradients(y: Tensor, inputs: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, ...]:
    """Of ``y`` for ``dy``."""
    return torch.autograd.grad(y, inputs, dy.to(y.dtype))


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same values, wanting gradients."""
    return tuple(t.detach().clone().requires_grad_() for t in tensors)


def widen(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments in float64."""
    return tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def no_worse(name: str, ours: Tensor, eager: Tensor, exact: Tensor, roundings: int = 1) -> None:
    """Ours is as near to the exact result as PyTorch's, but for some roundings of its own."""
    assert ours.shape == exact.shape, f"{name}: {tuple(ours.shape)} instead of {tuple(exact.shape)}"
    if not ours.is_floating_point():
        assert torch.equal(ours, eager), f"{name} differs"
        return
    eps = roundings * torch.finfo(ours.dtype).eps
    ours, eager = ours.double() - exact, eager.double() - exact
    tiny = 1e-30
    bound = 1.05 * eager.norm() + eps / 2 * exact.norm() + tiny
    assert ours.norm() <= bound, f"{name}: error {ours.norm():.3e}, PyTorch's {eager.norm():.3e}, bound {bound:.3e}"
    most = eager.abs().max() + eps * exact.abs().max() + tiny if exact.numel() else 1.0
    assert not exact.numel() or ours.abs().max() <= most, f"{name}: largest error {ours.abs().max():.3e}, {most:.3e}"
