r"""``fused_dropout_norm``: the end of a BERT sublayer, after its product: dropout, the residual, LayerNorm.

Forward, as one kernel, and likewise backward::

    h = residual + dropout(x)        y = LayerNorm(h)

Kept for backward, each ``[*, H]``::

    stock    a byte an element of the mask, h, and y again in the next product
    here     h, and two numbers a row; y is recomputed from them, and the mask from its seed

**The masks are not stock's**, but of the same distribution. Source: Ba et al. (2016), arXiv:1607.06450.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_memsave.ops.fused.joint import Joint, edge_of, leaves_if_hooked
from hf_memsave.ops.fused.kernels import LONGEST_ROW, can_run, draws_as_stock, is_watched, kernels, seed_for
from hf_memsave.ops.fused.linear import give_low
from hf_memsave.ops.op import Op, is_parametrized, once_differentiable
from hf_memsave.tape import Tape, current
from hf_memsave.tape.autocast import widens
from hf_memsave.tape.parameters import copy_all
from hf_memsave.tape.private import no_modes


def _dropout_norm(module: nn.Module, patch: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    """Run the forward of a module that computes ``LayerNorm(dropout(dense(hidden_states)) + input_tensor)``."""
    if _has_no_kernel(module, None):  # it may have changed since it was patched
        return patch.stock.forward(module, hidden_states, input_tensor)
    parts: Any = module
    norm, p = parts.LayerNorm, parts.dropout.p if parts.dropout.training else 0.0
    x = parts.dense(hidden_states)
    fits = isinstance(x, Tensor) and x.shape == input_tensor.shape and x.shape[-1:] == norm.weight.shape
    if not fits or p == 1 or (p and draws_as_stock(x, patch)) or not can_run(x, input_tensor, norm.weight, norm.bias):
        return norm(parts.dropout(x) + input_tensor)
    out, low = torch.promote_types(x.dtype, input_tensor.dtype), None
    if widens(x, "layer_norm"):
        out, low = torch.float32, torch.get_autocast_dtype(x.device.type)
    how = norm.eps, p, seed_for(x) if p else 0, out, None if low is out else low
    with no_modes():
        return _taped((x, input_tensor, norm.weight, norm.bias), *how)


def _taped(tensors: tuple[Tensor, ...], eps: float, p: float, seed: int, out: torch.dtype, low: Any) -> Any:
    x, residual, weight, bias = tensors
    tape = current()
    if tape is None:
        return _DropoutNorm.apply(*tensors, residual, eps, p, seed, out, None, None)[0]
    edge, joint = (residual, None) if residual.dtype is x.dtype else edge_of(tape, residual)
    y, h, y_low, mean, rstd = _DropoutNorm.apply(*tensors, edge, eps, p, seed, out, low, joint)
    copy_all(tape, [weight, bias])
    sources = _before(tape, residual, h.dtype) or (residual,)
    tape.record(h, lambda x, other, *norm: kernels().dropout_sum(x, other, p, seed, norm or None), (x, *sources))
    made = h, weight, bias, mean, rstd
    tape.record(y, partial(kernels().layer_norm_again, out=out), made)
    tape.memo[_before] = weakref.ref(y), _state(tape, y), made, [t._version for t in made]
    if low is not None:
        give_low(tape, y, y_low, (partial(kernels().layer_norm_again, out=low), made))
    return y


def _before(tape: Tape, y: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...] | None:
    """Return the sum, weight, bias, mean and rstd from which the block's last such norm made y; None if it did not."""
    ref, state, made, versions = tape.memo.get(_before, (None, None, (), []))
    is_it = ref is not None and ref() is y and state == _state(tape, y) and y.dtype is made[0].dtype is dtype
    return made if is_it and versions == [t._version for t in made] else None


def _state(tape: Tape, y: Tensor) -> tuple[int, ...]:
    return y._version, tape.block, tape.root.unversioned  # versions do not tell any more of what was written to


@leaves_if_hooked
class _DropoutNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, edge: Tensor, eps: float, p: float,
        seed: int, out: torch.dtype, low: torch.dtype | None, joint: Joint | None,
    ) -> Any:  # fmt: skip
        found = kernels().dropout_norm_forward(x, residual, weight, bias, eps, p, seed, out, low)
        ctx.save_for_backward(found.h, weight, bias, found.mean, found.rstd)
        ctx.mark_non_differentiable(*[t for t in (found.low, found.mean, found.rstd) if t is not None])
        ctx.set_materialize_grads(False)
        ctx.how, ctx.joint = (p, seed, x.dtype, residual.dtype), joint
        return found.y, found.h, found.low, found.mean, found.rstd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, *rest: None) -> Any:
        h, weight, bias, mean, rstd = ctx.saved_tensors
        found = kernels().dropout_norm_backward(
            torch.zeros_like(h) if dy is None else dy, h, weight, bias, mean, rstd, *ctx.how, dh=dh,
            has_dw=any(ctx.needs_input_grad[2:4]),
        )  # fmt: skip
        dx, dresidual, dw, db = found[:4]
        joined = None if ctx.joint is None else ctx.joint.sum_for(ctx, 4, dy, dh)  # its place among the tensors
        if joined is not None:
            joined.total = dresidual if joined.total is None else joined.total.add_(dresidual)
            dresidual = None
        return dx, None, dw, db, dresidual, *[None] * 6


def _has_no_kernel(module: nn.Module, value: Any) -> str:
    norm: Any = getattr(module, "LayerNorm", None)
    dropout: Any = getattr(module, "dropout", None)
    if not isinstance(norm, nn.LayerNorm) or len(norm.normalized_shape) != 1 or norm.normalized_shape[0] > LONGEST_ROW:
        return f"expected a LayerNorm over one dimension of at most {LONGEST_ROW}, got {norm}"
    if type(norm).forward is not nn.LayerNorm.forward or type(dropout) is not nn.Dropout:
        return f"its parts are {type(norm).__name__} and {type(dropout).__name__}, expected LayerNorm and Dropout"
    if norm.weight is None or norm.bias is None or is_parametrized(norm):
        return "its LayerNorm has no weight, no bias or computes them when they are read"
    if dropout.inplace or is_watched(norm) or is_watched(dropout):
        return "its LayerNorm or dropout has hooks or a forward of its own, or works in place"
    return ""


FUSED_DROPOUT_NORM = Op("fused_dropout_norm", _dropout_norm, _has_no_kernel, is_implied=True, replaces_stock=True)
