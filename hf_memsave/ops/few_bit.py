r"""``few_bit``: an activation that keeps a few bits of its derivative, for where its output is not kept either.

Forward, stock's own, and, for an incoming gradient dy, backward::

    y = f(x)
    c = the piece that x lies in         one of 2^b, see :mod:`~hf_memsave.ops.few_bit_tables`
    dx = dy l_c                          l_c: the mean of f' on the piece

Kept for backward::

    eager    x, and y in the next linear if its weight is trained
    here     c in b bits an element (b/16 of x's bytes in bf16), and y in that linear

For activations whose next linear is frozen; where it is trained, ``inverted`` keeps less and errs less. Forward is
exact. The largest error of the slope falls from .5 (1 bit) to .004 (8 bits) on [-10, 10]: scripts/results/
inverse-derivatives.md has them all. Beyond, the outermost levels hold. Backward cannot be differentiated again.
Source: Novikov et al. (2023), FewBit, arXiv:2202.00441.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_memsave.ops.elementwise import required_name
from hf_memsave.ops.few_bit_tables import check_bits, levels
from hf_memsave.ops.once import once_differentiable
from hf_memsave.ops.op import Binding, KeptBytes
from hf_memsave.tape.codecs import pack_codes, unpack_codes


class FewBit(NamedTuple):
    """The value of a binding that chose ``activation="few_bit"``."""

    bits: int = 4


def kept_bytes(shape: tuple[int, ...], itemsize: int, bits: int = 4) -> KeptBytes:
    """The activation of ``shape`` and a frozen linear after it."""
    n = torch.Size(shape).numel()
    return KeptBytes(n * itemsize, bits * -(-n // 8))


def few_bit(x: Tensor, name: str, forward: Callable[[Tensor], Tensor], bits: int = 4) -> Tensor:
    """``forward(x)``, which computes the activation ``name``; keeps ``bits`` bits an element."""
    check_bits(bits)
    return _FewBit.apply(x, forward, name, bits)


class _FewBit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], name: str, bits: int) -> Tensor:
        boundaries = torch.from_numpy(levels(name, bits).boundaries).to(x.device)
        codes = torch.bucketize(x.float().contiguous(), boundaries, out_int32=True, right=True)
        ctx.save_for_backward(pack_codes(codes.to(torch.uint8), bits))
        ctx.table = name, bits
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (packed,) = ctx.saved_tensors
        codes = unpack_codes(packed, dy.numel()).view(dy.shape)
        slope = torch.from_numpy(levels(*ctx.table).levels).to(dy.device)[codes.int()]
        return (dy * slope).to(dy.dtype), None, None, None


def few_bit_forward(module: nn.Module, binding: Binding, input: Tensor) -> Tensor:
    """The forward of a patched module, for ``activation="few_bit"``."""
    return few_bit(input, required_name(module), partial(binding.stock.forward, module), binding.value.bits)
