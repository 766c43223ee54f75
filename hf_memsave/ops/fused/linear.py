r"""``linear``: a linear with fp32 parameters under autocast, without the conversions that its products do not need.

Forward, with x̃, W̃ and b̃ in autocast's dtype, and for an incoming gradient dy in that dtype::

    y = x̃ W̃ᵀ + b̃          dx = dy W̃          dW = dyᵀ x̃          db = Σ dy

Launches beside the products::

    stock    x̃, W̃ and b̃;  Σ;  dx, dW and db from autocast's dtype to fp32
    here     x̃, once for all that take x;  W̃ and b̃, at once for linears that come after each other;  W̃ again;  Σ, but
             where the kernel that made dy has it

Kept for backward: x̃, or what it was made from; stock keeps W̃ too. Products add up in fp32 and give dx and dW as they
are, where stock rounds both first. Gradients of gradients are refused. Shared conversions notice writes that
versions and the tape show, but none through a NumPy alias.
Source: Micikevicius et al. (2018), arXiv:1710.03740.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hf_memsave.device import add_product, current_stream, is_autocast, wide_product
from hf_memsave.ops.fused.joint import Joint, edge_of, leaves_if_hooked
from hf_memsave.ops.fused.kernels import can_run
from hf_memsave.ops.fused.low_parameters import Low, LowParameters
from hf_memsave.ops.op import once_differentiable
from hf_memsave.tape import Tape, private
from hf_memsave.tape.products import is_thin, product, record_if_chosen

#: Types of tensors that override no functions.
_PLAIN = frozenset({Tensor, nn.Parameter, private.FakeTensor})
#: Groups of parameters that the forwards, and the backwards, of all models have learned.
_forwards, _backwards = WeakIdKeyDictionary(), WeakIdKeyDictionary()
#: Attribute of an incoming gradient: the sum of its rows, and the version that has this sum.
_SUM = "_memsave_sum"
#: Running backward, device and stream -> the parameters converted there.
_running: dict[Any, LowParameters] = {}


def linear(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``F.linear(x, weight, bias)`` or ``torch.addmm(bias, x, weight)``, as GPT-2 has it: the tape's handler."""
    is_turned = func is torch.addmm
    if not kwargs and (len(args) == 3 or (len(args) == 2 and not is_turned)):
        x, weight, bias = [*args[1:], args[0]] if is_turned else [*args, None][:3]
        if _is_suited(tape, x, weight, bias) and (bias is not None if is_turned else not is_thin(weight)):
            with private.no_modes():
                y = _called(tape, x, weight, bias, is_turned)
                if tape.frame.recomputed:
                    record_if_chosen(tape, y, func, args, {})
            return y
    return product(tape, func, args, kwargs)


FUNCTIONS = {F.linear: linear, torch.addmm: linear}


def _is_suited(tape: Tape, x: Any, weight: Any, bias: Any) -> bool:
    """Return whether autocast is on for these tensors, and stock would convert parameters for this product alone."""
    if not private.any_autocast() or type(x) not in _PLAIN or not is_autocast(x) or not tape.is_innermost():
        return False
    if tape.frame.head is not None and weight is tape.frame.head.weight:  # its logits may be computed later
        return False
    around = private.innermost_mode()
    if not getattr(around, "lets_by", around is None) or x.is_inference() or x.dim() < 2:  # it wants to see the call
        return False
    low = torch.get_autocast_dtype(x.device.type)
    if low == torch.float32 or x.dtype not in (torch.float32, low) or not _is_wide(weight, 2, x):
        return False
    return can_run(x, weight) if bias is None else _is_wide(bias, 1, x) and can_run(x, weight, bias)


def _is_wide(p: Any, dim: int, x: Tensor) -> bool:
    """Return whether p is a trained fp32 parameter of ``dim`` dimensions, on the device of x."""
    is_parameter = type(p) in _PLAIN and p.is_leaf and p.requires_grad and not p.is_inference()
    return is_parameter and p.dtype is torch.float32 and p.device == x.device and p.numel() > 0 and p.dim() == dim


def _called(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None, is_turned: bool) -> Any:
    dtype = torch.get_autocast_dtype(x.device.type)
    low = x if x.dtype == dtype else _input(tape, x, dtype)
    parameters: LowParameters | None = tape.memo.get(LowParameters)
    if parameters is None:
        if private.backward_id() == -1:
            _running.clear()  # of backwards that ended with an error
        parameters = tape.memo[LowParameters] = LowParameters(_forwards)
        tape.at_end.append(parameters.end)
    where = tape.block, tape.root.unversioned  # versions do not tell any more of what was converted
    with torch.no_grad():
        w, b = (None if p is None else parameters.low(p, dtype, where) for p in (weight, bias))
    edge, joint = edge_of(tape, x, weight) if x.dtype is torch.float32 else (x, None)
    # A parameter may be given other bytes before backward, by ``.data =``: not where an engine gives it its own again.
    held = None if tape.content_of(weight).is_sharded else weight.detach()
    return _Linear.apply(edge, weight, bias, low, w, b, is_turned, tape.block, joint, held)


def give_low(tape: Tape, x: Tensor, low: Tensor, made: tuple[Any, tuple[Tensor, ...]] | None = None) -> None:
    """Tell the next linears that x in autocast's dtype is ``low``."""
    # The call that made it is recorded when one takes it: maybe in the next block, where these calls are forgotten.
    versions = [] if made is None else [argument._version for argument in made[1]]
    tape.memo[give_low] = weakref.ref(x), Low(low, x._version), made, versions


def _input(tape: Tape, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x̃ (x in autocast's dtype), shared by consecutive linears of x."""
    ref, known, made, versions = tape.memo.get(give_low, (None, None, None, None))
    if ref is not None and ref() is x and known.is_of(x, dtype):
        content = tape.content_of(x)
        if tape.owns(content) and not content.is_unversioned:
            if made is not None:
                if versions == [argument._version for argument in made[1]]:
                    tape.record(known.tensor, *made)
                give_low(tape, x, known.tensor)
            return known.tensor
    low = _cast(tape, x, dtype)
    give_low(tape, x, low)
    return low


def _cast(tape: Tape, x: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.no_grad():
        low = x.to(dtype)
    if x.requires_grad:
        tape.as_activation(low)
    tape.record(low, Tensor.to, (x, dtype))
    return low


def _low_again(weight: Tensor, own: Tensor | None, dtype: torch.dtype, block: int) -> Tensor:
    """Convert ``weight`` to W̃ in backward, with its group if it is the parameter ``own``, not an offload's copy."""
    if own is None or own.untyped_storage()._cdata != weight.untyped_storage()._cdata:
        return weight.to(dtype)
    key = private.backward_id(), weight.device, current_stream(weight.device)
    parameters = _running.get(key)
    if parameters is None:
        parameters = _running[key] = LowParameters(_backwards)
        private.after_backward(partial(_forget, key))
    return parameters.low(own, dtype, block)  # another thread's forward may have cleared them


def _forget(key: Any) -> None:
    if (parameters := _running.pop(key, None)) is not None:
        parameters.end()


@leaves_if_hooked
class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor, w: Tensor, b: Tensor | None,
        is_turned: bool, block: int, joint: Joint | None, held: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(low, weight if ctx.needs_input_grad[0] else None)
        ctx.set_materialize_grads(False)
        ctx.x, ctx.is_turned, ctx.block, ctx.own, ctx.joint = x.dtype, is_turned, block, weakref.ref(weight), joint
        ctx.held = held if ctx.needs_input_grad[0] else None
        y = F.linear(low, w.t() if is_turned else w, b)
        return y if y._base is None else private.unsafe_view(y, y.shape)  # of a view, autograd would refuse writes

    @staticmethod
    @once_differentiable
    @private.no_autocast()
    def backward(ctx: Any, dy: Tensor) -> Any:
        low, weight = ctx.saved_tensors
        rows, into = low.reshape(-1, low.shape[-1]), dy.reshape(-1, dy.shape[-1])
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            w = _low_again(weight if ctx.held is None else ctx.held, ctx.own(), low.dtype, ctx.block)
            w = w.t() if ctx.is_turned else w
            joined = None if ctx.joint is None else ctx.joint.sum_for(ctx, 0, dy)
            if joined is not None and joined.total is not None:
                add_product(joined.total.view(rows.shape), into, w)
            else:
                dx = wide_product(into, w, ctx.x).view(low.shape)
                if joined is not None:
                    joined.total, dx = dx, None
        if ctx.needs_input_grad[1]:
            a, b = (rows, into) if ctx.is_turned else (into, rows)
            dw = wide_product(a.t(), b, torch.float32)
        if ctx.needs_input_grad[2]:
            db, version = getattr(dy, _SUM, (None, 0))
            if db is None or version != dy._version:
                db = into.sum(0, dtype=torch.float32)
        return dx, dw, db, *[None] * 7


def wants_sum(y: Tensor) -> bool:
    """Return whether ``y`` is the direct output of a linear here whose bias wants its gradient."""
    node = y.grad_fn
    return isinstance(node, private.node_class(_Linear)) and bool(node.needs_input_grad[2])


def give_sum(dy: Tensor, db: Tensor | None) -> None:
    """Attach to ``dy`` the sum ``db`` of its rows, if known, for the linear's backward, until ``dy`` is written to."""
    setattr(dy, _SUM, (db, dy._version))
