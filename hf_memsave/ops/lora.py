r"""``lora``: PEFT's plain LoRA layer as one node of autograd.

Forward, with x ``[*, in]``, m the dropout's mask over 1 - p, and for an incoming gradient dz backward::

    y = x m     h = y Aᵀ     z = x Wᵀ + s h Bᵀ
    g = s dz    dB = gᵀ h    dA = (g B)ᵀ y     dx = (g B A) m + dz W

Kept for backward::

    stock    x in A's dtype, m, y and h; under autocast A, B and W in its dtype
    here     x as it came, which is mostly kept or recomputed anyway; m's seed, or what is cheaper; h

Exact: forward calls the functions that PEFT's layer calls, backward those that autograd would call for them, and x is
given twice, first to the adapter, so that autograd adds up its gradients in stock's order. A base layer that is no
frozen ``nn.Linear``, or runs again, stays a node of its own, whose output is given. Where gradients are
differentiated again, backward recomputes h from what it depends on.
Source: Hu et al. (2022), arXiv:2106.09685; ``Linear``, ``Linear4bit`` and ``Linear8bitLt`` of ``peft.tuners.lora``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_memsave.device import default_generator, fuses_dropout, is_autocast
from hf_memsave.ops.fused.kernels import is_watched
from hf_memsave.ops.op import Op
from hf_memsave.tape import Tape, current, private
from hf_memsave.tape.as_stock import run_counted
from hf_memsave.tape.autocast import low
from hf_memsave.tape.dropout import TURN, can_redraw, drawn, redrawn
from hf_memsave.tape.handles import KeptTensor, written
from hf_memsave.tape.parameters import Sharded, gathers_of
from hf_memsave.tape.products import is_thin
from hf_memsave.tape.recomputed import RecomputedProduct
from hf_memsave.tape.storage import Apart
from hf_memsave.tape.tape import MADE

#: All names in the forwards of PEFT's layers that compute what is written above.
_NAMES = frozenset(
    """_check_forward_args pop VARIANT_KWARG_KEYS disable_adapters merged unmerge base_layer _mixed_batch_forward dtype
    lora_A keys active_adapters lora_B lora_dropout scaling _cast_input_dtype weight lora_variant forward to clone torch
    is_autocast_enabled""".split()
)


class _Call(NamedTuple):
    """The parameters and settings of one forward."""

    into: torch.dtype  # x is converted to it before dropout
    low: torch.dtype | None  # autocast's; None where it is off
    scale: float
    p: float
    rounds: str  # what is rounded to the base layer's dtype: the "sum", the "summand" or ""
    a: Tensor
    b: Tensor
    weight: Tensor | None = None  # of the base layer, where its product is computed here
    bias: Tensor | None = None


def _lora(module: Any, patch: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    tape = current()
    if tape is None or args or kwargs:
        return patch.stock.forward(module, x, *args, **kwargs)
    with private.no_modes():  # which would see every shape and dtype that is asked for
        call = _call_of(module, patch.value, tape, x)
    if call is None:
        return patch.stock.forward(module, x)
    base = x if call.weight is not None else module._modules["base_layer"](x)
    if tape.ledger is None or tape.frame.replaces_stock:
        return _run(tape, call, x, base)
    return run_counted(tape, "lora", partial(_run, tape, call, x, base), _as_stock, (x, base, *call))


def _run(tape: Tape, call: _Call, x: Tensor, base: Tensor) -> Tensor:
    with private.no_modes():
        a, b = (call.a, call.b) if call.low is None else (low(tape, call.a), low(tape, call.b))
        z = _apply(tape, call, x, base, b, a)  # stock has the gradient of B first
        node: Any = z.grad_fn
        if node is not None and (call.p or call.low or call.into is not x.dtype):  # stock keeps y, and not x
            content = tape.content_of(x)
            kept = tape.handed_on(content, x) if content.is_handed_on else content
            node.apart = Apart(content, kept, x, tape.outer) if tape.owns(content) and kept is not None else None
        return z


def _as_stock(x: Tensor, base: Tensor, *settings: Any) -> Tensor:
    """Run the functions that PEFT's layer calls, except a base layer that has run, to count what they keep."""
    call = _Call(*settings)
    out = base if call.weight is None else F.linear(x, call.weight, call.bias)
    return _added(call.rounds, call.scale, out, F.linear(F.dropout(x.to(call.into), call.p), call.a), call.b)


def _call_of(layer: Any, rounds: str, tape: Tape, x: Any) -> _Call | None:
    """Return the call to run; None where PEFT's layer computes more than a plain adapter, or a hook or mode watches."""
    if (parts := plain_adapter(layer)) is None or not private.is_only_mode(tape) or tape.codec is not None:
        return None
    if type(x) not in MADE or x.dim() < 2 or not x.numel() or not _is_in_rows(x) or x.is_inference():
        return None
    dropout, of_a, of_b, scale = parts
    if Sharded.any_is_per_module or (a := _only_weight(of_a)) is None or (b := _only_weight(of_b)) is None:
        return None
    to = torch.get_autocast_dtype(x.device.type) if private.any_autocast() and is_autocast(x) else None
    if to is not None and x.is_leaf and x.requires_grad:  # autocast converts it once for all who read it
        return None
    if not a.requires_grad:  # then h alone is kept, which second derivatives make of x
        return None
    if (a.dtype != b.dtype and to is None) or (x.numel() == x.shape[-1] and 1 in a.shape):
        return None  # of one row, and rank or width 1, autograd computes gradients by another product
    p = float(dropout.p) if dropout.training and type(dropout) is nn.Dropout else 0.0
    if p and (p >= 1 or tape.frame.dropout == "stock"):
        return None
    if p and not (x.is_cpu or (fuses_dropout(x) and tape.frame.dropout != "mask" and can_redraw(x))):
        return None
    is_mixed = rounds == "summand" and torch.is_autocast_enabled()  # as PEFT's layers of bitsandbytes ask
    converts = not is_mixed and layer.__dict__.get("cast_input_dtype_enabled", True)
    base = layer._modules["base_layer"]
    is_own = not tape.frame.recomputed and type(base) is nn.Linear and not is_watched(base)  # a product in our node
    weight, bias = _frozen(base) if is_own else (None, None)
    return _Call(a.dtype if converts else x.dtype, to, scale, p, "" if is_mixed else rounds, a, b, weight, bias)


def plain_adapter(layer: Any) -> tuple[Any, Any, Any, float] | None:
    """Return dropout, A, B and scale of the only active adapter; None unless it is plain LoRA, and not merged."""
    own = layer.__dict__
    if own["_disable_adapters"] or own["merged_adapters"] or private.are_all_watched():
        return None
    parts, name = own["_modules"], own["_active_adapter"]
    if type(name) is not str:
        found = [one for one in name if one in parts["lora_A"]._modules]
        name = found[0] if len(found) == 1 else None
    if name not in parts["lora_A"]._modules or name in own.get("lora_variant", ()):
        return None
    dropout, a, b = parts["lora_dropout"]._modules[name], parts["lora_A"]._modules[name], parts["lora_B"]._modules[name]
    scale = own["scaling"][name]
    if is_watched(dropout):
        return None
    is_plain = type(dropout) is nn.Identity or (type(dropout) is nn.Dropout and not dropout.inplace)
    return (dropout, a, b, scale) if is_plain and type(scale) in (int, float) else None


def _is_in_rows(x: Tensor) -> bool:
    """Return whether x is laid out as a matrix, with no odd stride where a size is 1: else products may run batched."""
    size, stride = x.shape, x.stride()
    return x.is_contiguous() and all([stride[i] == stride[i + 1] * size[i + 1] for i in range(len(size) - 1)])


def _only_weight(linear: Any) -> Any:
    """Return the weight of a plain linear without bias or hooks; None of any other."""
    if type(linear) is not nn.Linear or linear._parameters.get("bias") is not None or is_watched(linear):
        return None
    weight = linear._parameters.get("weight")
    return weight if type(weight) is nn.Parameter and weight.is_contiguous() else None


def _frozen(base: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return a frozen linear's weight and bias; two Nones for any other, or if the tape may run its product again."""
    weight, bias = base._parameters.get("weight"), base._parameters.get("bias")
    is_plain = type(weight) is nn.Parameter and weight.is_contiguous() and not is_thin(weight)
    is_frozen = is_plain and not weight.requires_grad and (bias is None or not bias.requires_grad)
    return (weight, bias) if is_frozen and type(bias) in (nn.Parameter, type(None)) else (None, None)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tape: Tape, call: _Call, x: Tensor, base: Tensor, b: Tensor, a: Tensor) -> Tensor:
        out, to = base, call.low
        if call.weight is not None:
            out = F.linear(_as(x, to), _as(call.weight, to), _as(call.bias, to))
        y, ctx.again, kept = _dropped(tape, x, call.into, call.p) if call.p else (x.to(call.into), None, ())
        h = F.linear(y if to is None else _as(y, to), a)
        del y  # which is as large as x in fp32
        z = _added(call.rounds, call.scale, out, h, b)
        if call.weight is None:
            _record(tape, call, z, base, h)
        ctx.save_for_backward(x, h if ctx.needs_input_grad[4] else None, *kept)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.dtype = call, h.dtype
        # A parameter may be given other bytes before backward: `.data = `.
        ctx.weights = [(w, KeptTensor(w.detach())) for w in (call.a, call.b, call.weight) if w is not None]
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None) -> Any:
        if dz is None:
            return (None,) * 6
        saved = ctx.saved_tensors  # for which a checkpoint may run its block again
        with private.no_modes():
            return None, None, *_gradients(ctx, dz, *saved)


_apply = super(torch.autograd.Function, _Layer).apply  # without what torch.func alone needs


def _gradients(ctx: Any, dz: Tensor, x: Tensor, h: Any, *kept: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, ``base``, B and A; autograd converts each to the dtype of its tensor."""
    call, (_, _, wants_x, wants_base, wants_b, wants_a) = ctx.call, ctx.needs_input_grad
    of_a, of_b, *of_base = ctx.weights
    dx = dbase = da = db = back = None
    g = (dz.to(ctx.dtype) * call.scale).reshape(-1, call.b.shape[0])
    y = x.to(call.into)
    if kept:
        y, back = ctx.again(y, *kept)
    y = _as(y, call.low)
    if wants_b:
        if torch.is_grad_enabled():
            h = F.linear(y, _weight(call.low, *of_a))
        db = g.t().mm(h.reshape(-1, h.shape[-1]))
    if wants_x or wants_a:
        dh = g.mm(_weight(call.low, *of_b))
        if wants_a:
            da = dh.t().mm(y.reshape(-1, y.shape[-1]))
        del g, y
        if wants_x:
            dx = dh.mm(_weight(call.low, *of_a)).reshape(x.shape).to(call.into)
            dx = dx if back is None else back(dx)
    if wants_base and of_base:
        dbase = dz.reshape(-1, dz.shape[-1]).mm(_weight(call.low, *of_base[0])).reshape(x.shape)
    return dx, dbase if of_base else dz, db, da


def _weight(low: torch.dtype | None, parameter: Tensor, kept: KeptTensor) -> Tensor:
    weight = kept.get()
    if parameter.requires_grad and torch.is_grad_enabled():
        if not parameter.is_set_to(weight):
            raise written(parameter, kept.at)
        weight = parameter
    return _as(weight, low)


def _as(x: Any, dtype: torch.dtype | None) -> Any:
    """Convert a tensor as autocast would for a product; ``dtype`` is None where it is off."""
    return x if dtype is None or x is None or x.dtype in (dtype, torch.float64) else x.to(dtype)


def _added(rounds: str, scale: float, base: Tensor, h: Tensor, b: Tensor) -> Tensor:
    """Add the scaled adapter's output to the base layer's, rounded as in PEFT: z."""
    delta = F.linear(h, b if b.dtype == h.dtype else b.to(h.dtype)) * scale
    if rounds == "summand":
        return base + delta.to(base.dtype)
    return (base + delta).to(base.dtype) if rounds else base + delta


def _record(tape: Tape, call: _Call, z: Tensor, base: Tensor, h: Tensor) -> None:
    """Record how z is recomputed, if the base layer's output can be, as below the floor."""
    content = tape.content_of(base)
    if content is not None and (tape.call_that_made(base) is not None or content.make is not None):
        if (gathers := gathers_of(tape, (call.b,))) is not None:
            again = RecomputedProduct(partial(_added, call.rounds, call.scale), z.device.type, gathers)
            tape.record(z, again, (base, h, call.b))


def _dropped(tape: Tape, x: Tensor, into: torch.dtype, p: float) -> tuple[Tensor, Any, tuple[Tensor, ...]]:
    """Return dropout(x), a function of x and the kept tensors that gives it again with its backward, and these."""
    if fuses_dropout(x):
        with TURN:
            state = default_generator(x.device).get_state()
            return torch.native_dropout(x.to(into), p, True)[0], partial(_drawn, p), (state,)
    noise, again, kept = drawn(tape, x, p, into)
    return noise.mul_(x.to(into)), partial(_times, again), kept


def _times(again: Callable[..., Tensor], x: Tensor, *kept: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    noise = again(*kept)
    return x * noise, noise.mul


def _drawn(p: float, x: Tensor, state: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    y, mask = redrawn(x, state, p)
    return y, partial(torch.ops.aten.native_dropout_backward, mask=mask, scale=1.0 / (1.0 - p))


def check(module: nn.Module, value: Any) -> str:
    """Return why an op cannot stand for the forward of this PEFT layer, or "": the ``check`` of such ops."""
    forwards = (vars(cls).get("forward") for cls in type(module).__mro__ if "_memsave_patch" not in vars(cls))
    code = getattr(next(found for found in forwards if found is not None), "__code__", None)
    unknown = {"no code"} if code is None else set(code.co_names) - _NAMES
    return f"its forward has {', '.join(sorted(unknown))}: expected that of PEFT 0.18 to 0.21" if unknown else ""


LORA = Op("lora", _lora, check, is_implied=True)
