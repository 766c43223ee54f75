r"""The product of a gated MLP: SwiGLU, GEGLU.

Forward and, for an incoming gradient dz, backward, elementwise in float32::

    z = f(g) u
    dg = dz u f'(g)
    du = dz f(g)

g and u are two tensors, or the halves of one (``gate_up`` of Phi-3). Bytes an element in half precision: forward 6,
backward 10, backward with z again 12.
Source: Shazeer (2020), arXiv:2002.05202.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._activations import activation, check, slope
from ._define import define
from ._launch import ceil_div, launch, like

_BLOCK = 1024


@triton.jit
def _place(columns, BLOCK: tl.constexpr):
    """This program's row, its columns, and which of these are inside."""
    blocks = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return row, column, column < columns


@triton.jit
def gated_forward_kernel(g_ptr, u_ptr, z_ptr, stride, columns, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """The product z; rows of g and u are ``stride`` apart."""
    row, column, inside = _place(columns, BLOCK)
    g = tl.load(g_ptr + row * stride + column, mask=inside).to(tl.float32)
    u = tl.load(u_ptr + row * stride + column, mask=inside).to(tl.float32)
    tl.store(z_ptr + row * columns + column, activation(g, ACT) * u, mask=inside)


@triton.jit
def gated_backward_kernel(
    dz_ptr, g_ptr, u_ptr, dg_ptr, du_ptr, z_ptr, stride, columns, ACT: tl.constexpr, BLOCK: tl.constexpr
):
    """The gradients, and z unless its pointer is None; rows of g, u and their gradients are ``stride`` apart."""
    row, column, inside = _place(columns, BLOCK)
    dz = tl.load(dz_ptr + row * columns + column, mask=inside).to(tl.float32)
    g = tl.load(g_ptr + row * stride + column, mask=inside).to(tl.float32)
    u = tl.load(u_ptr + row * stride + column, mask=inside).to(tl.float32)
    f = activation(g, ACT)
    if z_ptr is not None:
        tl.store(z_ptr + row * columns + column, f * u, mask=inside)
    tl.store(dg_ptr + row * stride + column, dz * u * slope(g, ACT), mask=inside)
    tl.store(du_ptr + row * stride + column, dz * f, mask=inside)


def _rows(u: Tensor | None, z: Tensor) -> tuple[int, int, int]:
    """Rows, the elements from one to the next, and those of one: all of two tensors are one row."""
    if u is not None:
        return 1, z.numel(), z.numel()
    return z.numel() // max(1, z.shape[-1]), 2 * z.shape[-1], z.shape[-1]


def _halves(g: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor]:
    if u is not None:
        return g, u
    first, second = g.chunk(2, -1)
    return first, second


def _run(kernel: Any, tensors: tuple[Tensor | None, ...], rows: tuple[int, int, int], act: str) -> None:
    count, stride, columns = rows
    grid = (count * ceil_div(columns, _BLOCK),)
    launch(kernel, grid, (*tensors, stride, columns), {"ACT": act, "BLOCK": _BLOCK})


def _forward(g: Tensor, u: Tensor | None, act: str) -> Tensor:
    z = _forward_fake(g, u, act)
    g, u_or_none = g.contiguous(), None if u is None else u.contiguous()
    _run(gated_forward_kernel, (*_halves(g, u_or_none), z), _rows(u, z), act)
    return z


def _forward_fake(g: Tensor, u: Tensor | None, act: str) -> Tensor:
    return g.new_empty(g.shape if u is not None else (*g.shape[:-1], g.shape[-1] // 2))


def _backward(dz: Tensor, g: Tensor, u: Tensor | None, act: str, again: bool) -> tuple[Tensor, Tensor, Tensor]:
    dg, du, z = _backward_fake(dz, g, u, act, again)
    g, u_or_none = g.contiguous(), None if u is None else u.contiguous()
    inputs, outputs = _halves(g, u_or_none), _halves(dg, None if u is None else du)
    tensors = (dz.contiguous(), *inputs, *outputs, z if again else None)
    _run(gated_backward_kernel, tensors, _rows(u, dz), act)
    return dg, du, z


def _backward_fake(dz: Tensor, g: Tensor, u: Tensor | None, act: str, again: bool) -> tuple[Tensor, Tensor, Tensor]:
    du = g.new_empty(0 if u is None else u.shape)
    return like(g), du, dz.new_empty(dz.shape if again else 0)


_forward_op = define("gated_forward(Tensor g, Tensor? u, str act) -> Tensor", _forward, _forward_fake)
_backward_op = define(
    "gated_backward(Tensor dz, Tensor g, Tensor? u, str act, bool again) -> (Tensor, Tensor, Tensor)",
    _backward, _backward_fake,
)  # fmt: skip


def gated_forward(g: Tensor, u: Tensor | None, act: str = "silu") -> Tensor:
    """``act(g) * u`` without autograd; the same bits whenever it is called.

    Args:
        g: ``[*, F]``, float32, bfloat16 or float16; ``[*, 2F]`` if ``u`` is None, which then is its second half.
        u: ``[*, F]`` in g's dtype, or None.
        act: One of ``ACTIVATIONS``.

    Returns:
        z ``[*, F]`` in g's dtype.
    """
    return _forward_op(g, u, check(act))


def gated_backward(
    dz: Tensor, g: Tensor, u: Tensor | None, act: str = "silu", again: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of :func:`gated_forward`, and z again in the same pass.

    Args:
        dz: ``[*, F]``, in z's dtype.
        g: As in forward.
        u: As in forward.
        act: As in forward.
        again: Whether z is wanted.

    Returns:
        dg like g, du like u or None, and z ``[*, F]`` or None.
    """
    dg, du, z = _backward_op(dz, g, u, check(act), again)
    return dg, None if u is None else du, z if again else None


def gated(g: Tensor, u: Tensor | None, act: str = "silu") -> Tensor:
    """``act(g) * u`` with its gradients; keeps g and u. Arguments as in :func:`gated_forward`."""
    return _Gated.apply(g, u, act)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, u: Tensor | None, act: str) -> Tensor:
        ctx.save_for_backward(g, u)
        ctx.act = act
        return gated_forward(g, u, act)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        g, u = ctx.saved_tensors
        dg, du, _ = gated_backward(dz, g, u, ctx.act)
        return dg, du, None
