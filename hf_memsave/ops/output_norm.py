r"""``output_norm``: a LayerNorm or RMSNorm whose backward starts from its output, which the next linear keeps anyway.

Forward, stock's own, and, for an incoming gradient dy, backward (means over H; RMSNorm has no β and no mean(g))::

    y = γ x̂ + β                 x̂ = (x - mean(x)) rstd,  or x rstd
    x̂ = (y - β) / γ             g = γ dy
    dx = rstd (g - mean(g) - x̂ mean(g x̂))        dγ = Σ dy x̂        dβ = Σ dy

Kept for backward (``[*, H]``)::

    eager    x, mean and rstd, and y in the next linear
    here     y, which the next linear shares, and rstd; γ and β themselves, which must not change before backward

The same bytes as the exact norm: what it spares is making y again. Forward is exact. x̂ has the
rounding of y, (|x̂| + |β/γ|) ulps: so columns with |β| > |γ|, and those whose γ is 0 or makes y subnormal, also keep
their x (and LayerNorm the rows' means). Finding them makes the host wait for the device: on CUDA one norm asks for all
that have run before, so that a forward waits once. Backward is once differentiable.

In half precision the gradients have twice the error of rounding or less, while dy and x̂ correlate by .7 or less in each
row: beyond, what is left of dy without x̂'s share shrinks, and the error does not. Where |x̂| is far below 1 in a column
whose β is not (the other columns of rows with outliers, rows with a variance far below eps), x̂ has little left of it.
Source: Tempo (2022), arXiv:2210.10246, Section 3.2 and Appendix D (which divides by γ unguarded).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_memsave.device import has_numbers, waits
from hf_memsave.ops.cast import HALVES, is_autocast
from hf_memsave.ops.once import once_differentiable
from hf_memsave.ops.op import KeptBytes, Op, is_parametrized
from hf_memsave.tape import current
from hf_memsave.tape.private import no_modes

#: One column in this many may keep its input.
_SHARE = 8
#: Those that have run on a device that the host would wait for.
_asking: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Normed(NamedTuple):
    """What a forward returns: y, rstd, and the means if it subtracts them, one a row."""

    y: Tensor
    rstd: Tensor
    mean: Tensor | None


def kept_bytes(shape: tuple[int, ...], itemsize: int, columns: int = 0, has_mean: bool = True) -> KeptBytes:
    """Of a LayerNorm (or an RMSNorm in fp32) on CPU and the linear after it; ``columns`` keep their input."""
    rows, n = torch.Size(shape[:-1]).numel(), torch.Size(shape).numel()
    wide = max(itemsize, 4)
    extra = columns * (rows * itemsize + 8) + (rows * wide if columns and has_mean else 0)
    return KeptBytes(2 * n * itemsize + (1 + has_mean) * rows * itemsize, n * itemsize + rows * wide + extra)


def in_need(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Finds the columns whose x̂ cannot be told from y well enough. Below 8 times tiny, γ makes much of y subnormal.

    An infinite γ leaves nothing of it.

    Returns:
        Their indices among all elements of ``weight``, on its device.
    """
    if not has_numbers(weight):
        return weight.new_empty(0, dtype=torch.long)
    return _is_in_need(weight.detach().flatten(), None if bias is None else bias.detach().flatten()).nonzero().flatten()


def _is_in_need(weight: Tensor, bias: Tensor | None) -> Tensor:
    size = weight.abs()
    finite = torch.finfo(weight.dtype)
    well = (size >= 8 * finite.tiny).logical_and_(size <= finite.max)
    if bias is not None:
        well &= bias.abs() <= size
    return well.logical_not_()


def _columns(module: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
    """:func:`in_need` of a norm; where the host would wait, found for all norms when the first of a forward asks."""
    tape = current()
    if tape is None or not waits(weight):
        return in_need(weight, bias)
    _asking.add(module)
    memo = tape.root.memo
    state = _state(weight, bias)
    if state not in memo:
        norms = [p for m in list(_asking) if _is_here(*(p := _parameters(m)[:2]), weight)]
        with no_modes():
            memo.update(_ask([p for p in norms if _state(*p) not in memo and p[0] is not weight] + [(weight, bias)]))
    return memo[state][0]


def _state(weight: Tensor, bias: Tensor | None) -> Any:
    """Another one when either has changed, or lies elsewhere."""
    return in_need, *((id(t), t._version, t.untyped_storage()._cdata) for t in (weight, bias) if t is not None)


def _is_here(weight: Tensor | None, bias: Tensor | None, like: Tensor) -> bool:
    """Whether the vectors of a norm can be read with those of ``like``: not where they are sharded or offloaded."""
    known = [t for t in (weight, bias) if t is not None]
    is_like = all(type(t) is type(like) and (t.device, t.dtype) == (like.device, like.dtype) for t in known)
    return weight is not None and is_like and all(t.untyped_storage().nbytes() for t in known)


def _ask(norms: list[tuple[Tensor, Tensor | None]]) -> dict[Any, Any]:
    """Find the columns of all, for one transfer to the host, and one back for each that has such columns.

    Returns:
        By state: :func:`in_need` of each, and its vectors, so that no other ones take their place in memory.
    """
    if has_numbers(norms[0][0]):
        weights = [weight.detach().flatten() for weight, _ in norms]
        biases = [
            torch.zeros_like(w) if b is None else b.detach().flatten() for w, (_, b) in zip(weights, norms, strict=True)
        ]
        found = _is_in_need(torch.cat(weights), torch.cat(biases)).cpu().split([len(w) for w in weights])
        columns = [one.nonzero().flatten().to(weights[0].device) for one in found]
    else:
        columns = [in_need(*norm) for norm in norms]
    return {_state(*norm): (one, norm) for norm, one in zip(norms, columns, strict=True)}


def output_norm(
    forward: Callable[..., Normed], x: Tensor, weight: Tensor, bias: Tensor | None, columns: Tensor | None = None
) -> Tensor:
    """``forward(x, weight, bias).y``, keeping y.

    Args:
        forward: Stock's, run without autograd.
        x: ``[*, *weight.shape]``, in weight's dtype.
        weight: γ.
        bias: β, or None.
        columns: The indices that :func:`in_need` found; None for none.

    Returns:
        y; what comes after should keep it too, or little is saved.
    """
    return _OutputNorm.apply(forward, columns, x, weight, bias)


class _OutputNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Callable[..., Normed], columns: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        y, rstd, mean = forward(x, weight, bias)
        inputs = None if columns is None else x.reshape(-1, weight.numel())[:, columns]
        ctx.is_centred = mean is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y, rstd, weight, bias, columns, inputs, None if columns is None else mean)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        y, rstd, weight, bias, columns, inputs, mean = ctx.saved_tensors
        dtype = torch.promote_types(y.dtype, torch.float32)
        gamma, rstd = weight.flatten().to(dtype), rstd.reshape(-1, 1).to(dtype)
        normed, dy = (t.reshape(-1, weight.numel()).to(dtype) for t in (y, dy))
        normed = (normed if bias is None else normed - bias.flatten()) / gamma
        if columns is not None:
            inputs = inputs.to(dtype)
            normed[:, columns] = (inputs if mean is None else inputs - mean.reshape(-1, 1)) * rstd
        dx = dweight = dbias = None
        if ctx.needs_input_grad[2]:
            dx = dy * gamma
            share = (dx * normed).mean(1, keepdim=True)
            dx = ((dx - dx.mean(1, keepdim=True) if ctx.is_centred else dx) - normed * share).mul_(rstd)
            dx = dx.to(y.dtype).view(y.shape)
        if ctx.needs_input_grad[3]:
            dweight = (dy * normed).sum(0).to(weight.dtype).view(weight.shape)
        if ctx.needs_input_grad[4]:
            dbias = dy.sum(0).to(weight.dtype).view(weight.shape)
        return None, None, dx, dweight, dbias


def layer_normed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Normed:
    """``F.layer_norm``; of halves, PyTorch rounds the statistics on CPU, so they are computed once more."""
    dims = tuple(range(-weight.dim(), 0))
    y, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
    if rstd.dtype in HALVES:
        var, mean = torch.var_mean(x.float(), dims, correction=0)
        rstd = torch.rsqrt(var + eps)
    return Normed(y, rstd, mean)


def rms_normed(x: Tensor, weight: Tensor, bias: None, eps: float) -> Normed:
    """``LlamaRMSNorm``."""
    h = x.to(torch.float32)
    r = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return Normed(weight * (h * r).to(x.dtype), r, None)


def t5_normed(x: Tensor, weight: Tensor, bias: None, eps: float) -> Normed:
    """``T5LayerNorm``."""
    r = torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)
    h = x * r
    return Normed(weight * (h.to(weight.dtype) if weight.dtype in HALVES else h), r, None)


def _of_class(cls: Any) -> Callable[..., Normed]:
    if issubclass(cls, nn.LayerNorm):
        return layer_normed
    return t5_normed if cls.__name__.startswith("T5") else rms_normed


def _parameters(module: nn.Module) -> tuple[Tensor | None, Tensor | None, Any]:
    eps = getattr(module, "eps", None) or getattr(module, "variance_epsilon", None)
    return getattr(module, "weight", None), getattr(module, "bias", None), eps


def _is_suited(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    # Where x and γ differ in dtype, the gradient of the wider one would get the rounding of y; and autocast would keep
    # a wider y than x.
    is_wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    return is_wanted and x.dtype == weight.dtype and not (is_autocast(x) and x.dtype in HALVES)


def _is_too_many(columns: Tensor, weight: Tensor) -> bool:
    return len(columns) * _SHARE > weight.numel()


def _output_norm(module: nn.Module, patch: Any, input: Tensor) -> Tensor:
    if is_parametrized(module):
        return patch.stock.forward(module, input)
    weight, bias, eps = _parameters(module)
    if weight is None or not _is_suited(input, weight, bias):
        return patch.stock.forward(module, input)
    columns = _columns(module, weight, bias)
    if _is_too_many(columns, weight):
        return patch.stock.forward(module, input)
    forward = partial(_of_class(patch.stock), eps=eps)
    return output_norm(forward, input, weight, bias, columns if len(columns) else None)


def _note(module: nn.Module, value: Any) -> str:
    weight, bias, _ = _parameters(module)
    if weight is None or weight.is_meta or not len(columns := in_need(weight, bias)):
        return ""
    share = f"{len(columns)} of {weight.numel()} columns"
    if _is_too_many(columns, weight):
        return f"recomputed from its input: {share} have |β| > |γ| or γ near 0, over one in {_SHARE}"
    return f"keeps the input of {share}: |β| > |γ| or γ near 0"


def _refuse(module: nn.Module, value: Any) -> str:
    if _parameters(module)[0] is not None:
        return ""
    return (
        "has no weight (γ), but norm='output' expects one: the backward of its output divides by it. Use "
        "norm='recompute', or norm='stock'."
    )


OUTPUT_NORM = Op("output_norm", _output_norm, note=_note, refuse=_refuse)
