"""``output_norm`` by one kernel each way: :mod:`~hf_memsave.ops.output_norm` has what it computes.

All is computed in fp32 and rounded once, so the output is not stock's bits; it is made again from z to the bit. Kept is
what the op keeps without kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_memsave.ops.fused.codes import are_wanted
from hf_memsave.ops.fused.kernels import kernels
from hf_memsave.ops.once import once_differentiable
from hf_memsave.tape import Tape
from hf_memsave.tape.private import no_modes

#: The longest row that a program holds.
_MOST = 65536


def suits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether kernels are wanted, and know such a norm."""
    return weight.dim() == 1 and len(weight) <= _MOST and are_wanted(x, weight, *[] if bias is None else [bias])


def fused_output_norm(
    tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, is_centred: bool
) -> Tensor:
    """The norm of x ``[*, N]``; the tape makes it again from z."""
    with no_modes():
        y, z = _OutputNorm.apply(x, weight, bias, eps, is_centred, tape)
        tape.record(y, _again, (z, weight, bias))
    return y


def _again(z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = kernels().output_norm_again(z, weight, bias)
    return y


class _OutputNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, is_centred: bool, tape: Tape
    ) -> Any:
        y, z, rstd = kernels().output_norm_forward(x, weight, bias, eps, is_centred)
        tape.as_activation(z)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(z)
        ctx.save_for_backward(z, rstd, weight, bias)
        ctx.is_centred = is_centred
        return y, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dz: None) -> tuple[Tensor | None, ...]:
        z, rstd, weight, bias = ctx.saved_tensors
        has_dw = any(ctx.needs_input_grad[1:3])
        found = kernels().output_norm_backward(dy, z, weight, bias, rstd, ctx.is_centred, has_dw)
        return *found, None, None, None
