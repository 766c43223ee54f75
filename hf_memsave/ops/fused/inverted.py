"""``inverted`` and ``precision_bit`` by one kernel each way: :mod:`~hf_memsave.ops.inverted` has what they compute.

The activation is computed in fp32 and rounded once, so it is not stock's bits. Kept is what the ops keep without
kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_memsave.ops.fused.kernels import ACTIVATIONS, kernels
from hf_memsave.ops.inverse import InverseFit
from hf_memsave.ops.once import once_differentiable
from hf_memsave.tape.private import no_modes


def fused_inverted(x: Tensor, name: str, fit: InverseFit, in_y: bool) -> Tensor:
    """The activation ``name`` of x; ``in_y`` puts the indicator into the output's lowest bit."""
    with no_modes():
        y: Tensor = _Inverted.apply(x, ACTIVATIONS[name], fit, in_y)
    return y


class _Inverted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, act: str, fit: InverseFit, in_y: bool) -> Tensor:
        y, bits = kernels().inverted_forward(x, act, fit.turn, in_y)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y, bits)
        ctx.fit = fit
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        y, bits = ctx.saved_tensors
        return kernels().inverted_backward(dy, y, bits, ctx.fit), None, None, None
