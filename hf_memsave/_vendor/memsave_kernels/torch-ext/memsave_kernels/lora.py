r"""What stands around the two products of a LoRA adapter: its input, and the sum at its end.

Input, in A's dtype, and for an incoming gradient dy, with the same mask::

    y = dropout(x)                 dx = dropout(dy) [+ the gradient of the frozen layer's own input]

End, and for an incoming gradient dz::

    z = base + s B(A(y))           dbase = dz        dB(A(y)) = s dz

The mask is not kept: y is drawn again from x and the seed. Bytes an element in half precision: input 4 each way (6 with
the sum), end 6, its backward 4.
Source: Hu et al. (2022), arXiv:2106.09685.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._define import define
from ._dropout import drop_args, dropped_out
from ._launch import ceil_div, launch, like

_BLOCK = 1024


@triton.jit(do_not_specialize=["seed", "threshold"])
def lora_input_kernel(
    x_ptr, add_ptr, y_ptr, seed: tl.int64, threshold: tl.int64, columns, DROPS: tl.constexpr, BLOCK: tl.constexpr
):
    """Dropout of x, plus ``add`` unless its pointer is None."""
    blocks = tl.cdiv(columns, BLOCK)
    row = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * BLOCK
    column = first + tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    at = row.to(tl.int64) * columns + column
    y = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if DROPS:
        y = dropped_out(y, seed, threshold, row + tl.zeros([1, 1], dtype=tl.int32), first, 1, BLOCK)
    if add_ptr is not None:
        y += tl.load(add_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y, mask=inside)


@triton.jit
def lora_output_kernel(base_ptr, b_ptr, z_ptr, scale, n, BLOCK: tl.constexpr):
    """What b times ``scale`` is, plus ``base`` unless its pointer is None."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    z = scale * tl.load(b_ptr + at, mask=inside).to(tl.float32)
    if base_ptr is not None:
        z += tl.load(base_ptr + at, mask=inside).to(tl.float32)
    tl.store(z_ptr + at, z, mask=inside)


def _input(x: Tensor, add: Tensor | None, p: float, seed: int, out: torch.dtype) -> Tensor:
    y = _input_fake(x, add, p, seed, out)
    columns = x.shape[-1]
    block = min(_BLOCK, max(16, triton.next_power_of_2(columns)))
    grid = (x.numel() // max(1, columns) * ceil_div(columns, block),)
    add = None if add is None else add.contiguous()
    args = (x.contiguous(), add, y, *drop_args(p, seed), columns)
    launch(lora_input_kernel, grid, args, {"DROPS": p > 0, "BLOCK": block})
    return y


def _input_fake(x: Tensor, add: Tensor | None, p: float, seed: int, out: torch.dtype) -> Tensor:
    return like(x, out)


def _output(base: Tensor | None, b: Tensor, scale: float, out: torch.dtype) -> Tensor:
    z = _output_fake(base, b, scale, out)
    base = None if base is None else base.contiguous()
    args = (base, b.contiguous(), z, scale, z.numel())
    launch(lora_output_kernel, (ceil_div(z.numel(), _BLOCK),), args, {"BLOCK": _BLOCK})
    return z


def _output_fake(base: Tensor | None, b: Tensor, scale: float, out: torch.dtype) -> Tensor:
    return like(b, out)


_input_op = define(
    "lora_input(Tensor x, Tensor? add, float p, int seed, ScalarType out) -> Tensor", _input, _input_fake
)
_output_op = define("lora_output(Tensor? base, Tensor b, float scale, ScalarType out) -> Tensor", _output, _output_fake)


def lora_input_forward(x: Tensor, p: float, seed: int, out: torch.dtype | None = None) -> Tensor:
    """An adapter's input without autograd; the same bits whenever it is called.

    Args:
        x: ``[*, N]``, float32, bfloat16 or float16.
        p: Probability of dropout.
        seed: Of the mask, below 2^63: from :func:`~memsave_kernels.draw_seed`.
        out: The dtype of A; x's, if None.

    Returns:
        y ``[*, N]`` in that dtype.
    """
    return _input_op(x, None, p, seed, out or x.dtype)


def lora_input_backward(dy: Tensor, p: float, seed: int, x: torch.dtype, add: Tensor | None = None) -> Tensor:
    """The gradient of :func:`lora_input_forward`.

    Args:
        dy: ``[*, N]``.
        p: As in forward.
        seed: As in forward.
        x: The dtype of x.
        add: ``[*, N]``: what else x gets, such as from the frozen layer, or None.

    Returns:
        dx ``[*, N]`` in x's dtype, ``add`` included.
    """
    return _input_op(dy, add, p, seed, x)


def lora_input(x: Tensor, p: float, seed: int, out: torch.dtype | None = None) -> Tensor:
    """An adapter's input with its gradient; keeps nothing. Arguments as in :func:`lora_input_forward`."""
    return _LoraInput.apply(x, p, seed, out)


class _LoraInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int, out: torch.dtype | None) -> Tensor:
        ctx.how = p, seed, x.dtype
        return lora_input_forward(x, p, seed, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return lora_input_backward(dy, *ctx.how), None, None, None


def lora_output_forward(base: Tensor, b: Tensor, scale: float) -> Tensor:
    """``base + scale * b`` without autograd; arguments as in :func:`lora_output`."""
    return _output_op(base, b, scale, base.dtype)


def lora_output_backward(dz: Tensor, scale: float, b: torch.dtype) -> Tensor:
    """The gradient of :func:`lora_output` for the adapter: ``scale * dz`` in its dtype, ``b``."""
    return _output_op(None, dz, scale, b)


def lora_output(base: Tensor, b: Tensor, scale: float) -> Tensor:
    """``base + scale * b`` with its gradients; keeps nothing.

    Args:
        base: ``[*, N]``, the frozen layer's output, float32, bfloat16 or float16.
        b: ``[*, N]``, the adapter's, in any of them.
        scale: What the adapter is multiplied by.

    Returns:
        ``[*, N]`` in base's dtype, rounded once.
    """
    return _LoraOutput.apply(base, b, scale)


class _LoraOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, base: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.dtype = scale, b.dtype
        return lora_output_forward(base, b, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        db = lora_output_backward(dz, ctx.scale, ctx.dtype) if ctx.needs_input_grad[1] else None
        return dz, db, None
