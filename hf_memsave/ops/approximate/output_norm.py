r"""``output_norm``: a LayerNorm or RMSNorm whose backward starts from its output.

Forward, stock's own, and, for an incoming gradient dy, backward (means over H; RMSNorm has no β and no mean(g))::

    y = γ x̂ + β                 x̂ = (x - mean(x)) rstd,  or x rstd
    z = y                       of columns that tell x̂ well: |γ| >= |β|, and γ not near 0, nor such that y overflows
        x̂                       of all others
    x̂ = (z - β) / γ,  or z of those others        g = γ dy
    dx = rstd (g - mean(g) - x̂ mean(g x̂))        dγ = Σ dy x̂        dβ = Σ dy

Kept for backward (``[*, H]``)::

    eager    x, mean and rstd, and y in the next linear
    here     z and rstd, and γ and β once more, from which y is recomputed for the next linear; γ and β themselves,
             which must not change before backward

The bytes of the exact norm, and more work; more bytes where x costs nothing (norms share it, or it could be
recomputed). It is here for the paper; ``norm="recompute"`` is exact, and faster. Which columns tell x̂ is found on the
device: the host waits for nothing. Where x is kept anyway, the norm is patched alone, or no tape can recompute y, it
runs as stock: the next linear would keep y beside z.

Forward is exact, but for kernels', which compute in fp32 and round once. What needs y in backward gets its bits; of a
LayerNorm of halves, in those other columns, γ x̂ + β of the rounded x̂: at most 1.23 times as far from the truth as y.
A NaN or infinite x, dy, γ or β has the effect on gradients that it has in stock. Once differentiable.

In half precision the gradients have twice the error of rounding or less, while dy and x̂ correlate by .7 or less in each
row: beyond, what is left of dy without x̂'s share shrinks, and the error does not. Where |x̂| is far below 1 in a column
whose β is not (rows with outliers, or with a variance far below eps), x̂ has little left of it.
Source: Tempo (2022), arXiv:2210.10246, Section 3.2 and Appendix D (which divides by γ unguarded).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_memsave.device import HALVES, is_autocast
from hf_memsave.ops.fused.codes import are_wanted
from hf_memsave.ops.fused.kernels import LONGEST_ROW, kernels
from hf_memsave.ops.op import Op, is_parametrized, once_differentiable
from hf_memsave.tape import Tape, current
from hf_memsave.tape.private import no_modes
from hf_memsave.tape.tensors import is_plain


class Normed(NamedTuple):
    """The results of a norm: y, x̂ in y's dtype, 1 / deviation of each row, and whether its mean was subtracted."""

    y: Tensor
    normed: Tensor
    rstd: Tensor
    is_centred: bool


def is_well(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return for each element of γ and β whether x̂ can be computed from y accurately enough."""
    # Below 8 tiny, γ makes much of y subnormal. No x̂ is above √H: y does not overflow if |β| <= |γ| and 2 √H |γ| < ∞.
    size, finite = weight.abs(), torch.finfo(weight.dtype)
    least, most = 8 * finite.tiny, finite.max / (2 * weight.numel() ** 0.5)
    return (size >= (least if bias is None else bias.abs().clamp(min=least))) & (size <= most)


def output_norm(
    forward: Callable[..., Normed], x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, is_fused: bool = False
) -> Tensor:
    """Return ``forward(x, weight, bias, eps).y`` of x ``[*, *weight.shape]``; ``is_fused``: by one kernel each way."""
    tape = current()
    with no_modes() if is_fused else contextlib.nullcontext():
        y, z = _OutputNorm.apply(forward, x, weight, bias, eps, is_fused, tape)
    if tape is not None:
        with no_modes():
            tape.record(y, kernels().output_norm_again if is_fused else _again, (z, weight, bias))
    return y


def _again(z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = weight * z if bias is None else torch.addcmul(bias, z, weight)
    return torch.where(is_well(weight, bias), z, y)


class _OutputNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Callable[..., Normed], x: Tensor, weight: Tensor, bias: Tensor | None, eps: float,
        is_fused: bool, tape: Tape | None,
    ) -> Any:  # fmt: skip
        ctx.is_fused = is_fused
        if is_fused:
            ctx.is_centred = forward is layer_normed
            y, z, rstd = kernels().output_norm_forward(x, weight, bias, eps, ctx.is_centred)
        else:
            y, normed, rstd, ctx.is_centred = forward(x, weight, bias, eps)
            z = torch.where(is_well(weight, bias), y, normed)
        if tape is not None:
            tape.as_activation(z)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(z)
        ctx.save_for_backward(z, rstd, weight, bias)
        return y, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dz: None) -> tuple[Tensor | None, ...]:
        z, rstd, weight, bias = ctx.saved_tensors
        _, has_dx, *has_vectors = ctx.needs_input_grad[:4]
        if ctx.is_fused:
            found = kernels().output_norm_backward(dy, z, weight, bias, rstd, ctx.is_centred, any(has_vectors))
            return None, *found, None, None, None
        dtype = torch.promote_types(z.dtype, torch.float32)
        gamma, rstd = weight.flatten().to(dtype), rstd.reshape(-1, 1).to(dtype)
        normed, dy = (t.reshape(-1, weight.numel()).to(dtype) for t in (z, dy))
        of_y = normed / gamma if bias is None else (normed - bias.flatten()).div_(gamma)
        normed = torch.where(is_well(weight, bias).flatten(), of_y, normed)
        del of_y
        dx = dweight = dbias = None
        if has_dx:
            dx = dy * gamma
            share = (dx * normed).mean(1, keepdim=True)
            dx = ((dx - dx.mean(1, keepdim=True) if ctx.is_centred else dx) - normed * share).mul_(rstd)
            dx = dx.to(z.dtype).view(z.shape)
        if has_vectors[0]:
            dweight = (dy * normed).sum(0).to(weight.dtype).view(weight.shape)
        if has_vectors[1]:
            dbias = dy.sum(0).to(weight.dtype).view(weight.shape)
        return None, dx, dweight, dbias, None, None, None


def layer_normed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Normed:
    """Run ``F.layer_norm``; compute the statistics again where PyTorch rounds them, as for halves on CPU."""
    dims = tuple(range(-weight.dim(), 0))
    y, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
    if rstd.dtype in HALVES:
        var, mean = torch.var_mean(x.float(), dims, correction=0, keepdim=True)
        rstd = torch.rsqrt(var + eps)
    return Normed(y, (x - mean).mul_(rstd).to(x.dtype), rstd, True)


def rms_normed(x: Tensor, weight: Tensor, bias: None, eps: float) -> Normed:
    """Run the forward of ``LlamaRMSNorm``."""
    h = x.to(torch.float32)
    r = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    normed = (h * r).to(x.dtype)
    return Normed(weight * normed, normed, r, False)


def t5_normed(x: Tensor, weight: Tensor, bias: None, eps: float) -> Normed:
    """Run the forward of ``T5LayerNorm``."""
    r = torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)
    normed = x * r
    normed = normed.to(weight.dtype) if weight.dtype in HALVES else normed
    return Normed(weight * normed, normed, r, False)


def _output_norm(module: nn.Module, patch: Any, input: Tensor) -> Tensor:
    # Alone, the norm's tape ends before y is read; and without a tape, y would be kept beside z.
    tape = current()
    if patch.config is not None or tape is None or is_parametrized(module) or tape.is_kept(input):
        return patch.stock.forward(module, input)
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    given = [t for t in (input, weight, bias) if t is not None]
    # Where x and γ differ in dtype, the wider one's gradient would get y's rounding; autocast would keep a wider y.
    if (
        weight is None or input.dtype != weight.dtype or (is_autocast(input) and input.dtype in HALVES)
        or not any(t.requires_grad for t in given) or not all(map(is_plain, given))
    ):  # fmt: skip
        return patch.stock.forward(module, input)
    eps: Any = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    is_fused = weight.dim() == 1 and len(weight) <= LONGEST_ROW and are_wanted(*given)
    rms = t5_normed if patch.stock.__name__.startswith("T5") else rms_normed
    normed = layer_normed if issubclass(patch.stock, nn.LayerNorm) else rms
    return output_norm(normed, input, weight, bias, eps, is_fused)


def _refuse(module: nn.Module, value: Any) -> str:
    if getattr(module, "weight", None) is not None:
        return ""
    return (
        "has no weight (γ), but norm='output' expects one: the backward of its output divides by it. Use "
        "norm='recompute', or norm='stock'."
    )


OUTPUT_NORM = Op("output_norm", _output_norm, refuse=_refuse, replaces_stock=True)
