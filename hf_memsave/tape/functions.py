"""The table of cheap functions. To add one: its word in the list that fits; CONTRIBUTING.md, "Adding things".

Cheap is what costs about a memory pass, draws nothing, and gives the same bits again: arithmetic, conversions, copies,
gathers, activations, norms. Not: reductions (their results are small), products (they are the model's work), and what
is not deterministic on CUDA (``index_add``, ``cumsum``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import init
from torch.nn.parameter import is_lazy

from hf_memsave.device import waits
from hf_memsave.tape.autocast import WIDENED, WIDENED_WITHIN, wide
from hf_memsave.tape.content import is_parameter
from hf_memsave.tape.parameters import CASTS
from hf_memsave.tape.private import c_functions
from hf_memsave.tape.tape import MADE, Handler, Tape, new
from hf_memsave.tape.tensors import leaves

#: Functions and methods whose result is always a new tensor.
NEW = """add sub subtract rsub mul multiply div divide true_divide neg negative pow float_power square sqrt rsqrt
reciprocal exp exp2 expm1 expit log log1p log2 log10 xlogy xlog1py logaddexp logaddexp2 sin cos tan sinh cosh tanh
asin acos atan atan2 asinh acosh atanh arcsin arccos arctan arctan2 arcsinh arccosh arctanh deg2rad rad2deg sinc hypot
sigmoid erf erfc erfcx erfinv ndtr ndtri log_ndtr entr lgamma gammaln digamma psi i0 i0e i1 i1e abs absolute sign sgn
signbit angle floor ceil round trunc fix frac fmod remainder floor_divide ldexp gcd lcm maximum minimum fmax fmin
clamp clamp_min clamp_max clip lerp addcmul addcdiv where masked_fill nan_to_num logit softmax log_softmax prelu fill
gt lt ge le eq ne greater less greater_equal less_equal not_equal isclose heaviside nextafter copysign complex polar
logical_not logical_and logical_or logical_xor bitwise_not bitwise_and bitwise_or bitwise_xor bitwise_left_shift
bitwise_right_shift isinf isposinf isneginf isnan isfinite isreal cat concat concatenate stack hstack vstack dstack
block_diag repeat tile repeat_interleave roll flip fliplr flipud rot90 index_select gather take
take_along_dim index_fill masked_scatter diag_embed diagonal_scatter select_scatter slice_scatter tril triu clone
rms_norm arange zeros ones full zeros_like ones_like full_like
__rsub__ __rdiv__ __rtruediv__ __rpow__ __rmul__ __radd__ __pow__ __floordiv__ __rfloordiv__ __mod__ __rmod__
__lshift__ __rshift__ __rlshift__ __rrshift__ __and__ __or__ __xor__ __rand__ __ror__ __rxor__ __invert__""".split()
#: Functions of ``torch.nn.functional`` whose result is always new, and their namesakes elsewhere.
NEW_FUNCTIONAL = """gelu silu elu selu celu softplus mish hardswish hardsigmoid logsigmoid softsign tanhshrink softmin
hardshrink softshrink glu softmax log_softmax sigmoid tanh layer_norm rms_norm group_norm normalize""".split()
#: Functions that may return their argument, or a view of it.
MAY_ALIAS = """to type type_as float half bfloat16 double bool byte char short int long cfloat contiguous
reshape flatten reshape_as ravel pixel_shuffle pixel_unshuffle channel_shuffle""".split()
#: Norms and activations, which a configuration may leave to stock.
NORMS = frozenset({F.layer_norm, F.rms_norm, torch.rms_norm, torch.layer_norm, F.group_norm, torch.group_norm})
ACTIVATIONS = frozenset(
    {getattr(F, name) for name in "gelu silu elu selu celu softplus mish hardswish hardsigmoid glu".split()}
    | {torch.celu, torch.selu}
)


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, default: Any = None) -> Any:
    """Return an argument of a call, given by place or by name."""
    return args[place] if place < len(args) else kwargs.get(name, default)


def writes_in_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function of ``torch.nn.functional`` is called with ``inplace``."""
    return bool(kwargs.get("inplace")) or any(a is True for a in args[1:])


def sees_writes(handler: Handler) -> Handler:
    """Mark a handler whose function writes to an argument: it is called where nothing is recorded too."""
    handler.is_write = True  # type: ignore[attr-defined]
    return handler


def joined(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``torch.cat`` and the like: record their list, which its owner may change later, as a tuple."""
    return new(tape, func, (tuple(args[0]), *args[1:]) if args and type(args[0]) is list else args, kwargs)


def factory(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``torch.zeros`` and the like: record the device too, as in backward another one may be the default."""
    out = func(*args, **kwargs)
    if type(out) in MADE and kwargs.get("out") is None:
        tape.record(out, func, args, {**kwargs, "device": out.device})
    return out


def unrecorded(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a function that is left to stock: record nothing but its writes, by ``out=`` or ``inplace=``."""
    tape.before_writes(args, kwargs)
    return func(*args, **kwargs)


def may_alias(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a function whose result may share storage with its argument: then record nothing."""
    out = func(*args, **kwargs) if kwargs else func(*args)
    if not args or out is args[0] or type(out) not in MADE or not isinstance(args[0], Tensor):
        return out
    try:
        if out.untyped_storage() is args[0].untyped_storage() or out.device != args[0].device:
            return out
    except NotImplementedError:  # sparse
        return out
    if len(args) > 1 and isinstance(args[1], Tensor) and func in CASTS:  # which is there for its dtype
        func, args, kwargs = Tensor.to, (args[0], out.dtype), {}
    tape.record(out, func, args, kwargs)
    return out


def indexed(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``x[index]``: record nothing for a mask on a GPU, whose count is waited for: backward would wait too."""
    for i in args[1] if type(args[1]) is tuple else args[1:]:
        if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) and waits(i):
            return func(*args, **kwargs)
    return may_alias(tape, func, args, kwargs)


def may_write(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a function of ``torch.nn.functional`` with ``inplace=``."""
    return (writes if writes_in_place(args, kwargs) else new)(tape, func, args, kwargs)


def _before_write(tape: Tape, target: Tensor) -> None:
    tape.before_write(target)
    if tape.may_alias_parameter(target):
        tape.mark_unversioned(target)


@sees_writes
def writes(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a function that writes to its first argument."""
    target = argument(args, kwargs, 0, "input", kwargs.get("tensor"))
    if not isinstance(target, Tensor) or target.is_inference():
        return func(*args, **kwargs)
    _before_write(tape, target)
    version = target._version
    out = func(*args, **kwargs)
    if target._version == version:  # ``apply_`` and ``map_``
        tape.mark_unversioned(target)
    return out


@sees_writes
def write_all(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a function that writes to all tensors of its first argument, a list."""
    for target in args[0] if args else kwargs.get("self", ()):
        _before_write(tape, target)
    return func(*args, **kwargs)


@sees_writes
def writes_unseen(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle an optimizer's step in one function, which writes to tensors in lists, unseen by their versions."""
    for target in leaves(args, kwargs):
        tape.before_write(target)
        tape.mark_unversioned(target)
    return func(*args, **kwargs)


@sees_writes
def embedding(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``F.embedding`` and ``F.embedding_bag``, which with ``max_norm`` write to long rows of the weight."""
    weight = argument(args, kwargs, 1, "weight")
    if argument(args, kwargs, 3, "max_norm") is not None and isinstance(weight, Tensor):
        tape.before_write(weight)
    return func(*args, **kwargs)


@sees_writes
def unversioned_alias(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``x.data``, an alias with its own version, and ``x.data = y``: the version of ``x`` tells of no write."""
    if is_lazy(args[0]):
        return func(*args, **kwargs)
    if len(args) == 1 and isinstance(args[0], nn.Parameter) and type(args[0]) is not nn.Parameter:
        return args[0].detach()  # a quantized weight, dequantized from its ``.data``: its version must go on telling
    tape.before_write(args[0])
    out = func(*args, **kwargs)
    tape.mark_alias(args[0])
    return out


@sees_writes
def address(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``x.data_ptr()``, DLPack and NumPy: who has the address may write there, unseen by the version of x."""
    if not is_parameter(args[0]):
        tape.before_write(args[0])
        tape.mark_unversioned(args[0])
    return func(*args, **kwargs)


def named(names: Iterable[str], *homes: Any) -> Iterator[Any]:
    """Yield the functions of these names that ``homes``, modules and classes, have."""
    for name in names:
        for home in homes:
            if callable(found := getattr(home, name, None)):
                yield found


_IN_PLACE = [name for name in dir(Tensor) if name.endswith("_") and not name.endswith("__")]
_IN_PLACE += [name for home in (torch, F, c_functions) for name in dir(home) if name.endswith("_") and name[0] != "_"]
_IN_PLACE = sorted({*_IN_PLACE} - {"requires_grad_", "detach_", "share_memory_", "rename_"})
_IN_PLACE += [name for name in dir(Tensor) if name.startswith("__i") and name[3:-2] in
              "add sub mul div truediv floordiv mod pow and or xor lshift rshift".split()]  # fmt: skip
_WRITE_ALL = [name for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_")]
_WRITE_UNSEEN = [name for name in dir(torch) if name.startswith(("_fused_", "_amp_")) and name.endswith("_")]

#: Function -> handler, of cheap functions and of functions that write to their arguments.
CHEAP: dict[Any, Handler] = {
    **dict.fromkeys(named(_IN_PLACE, Tensor, torch, F, c_functions), writes),
    **dict.fromkeys((init.uniform_, init.normal_, init.constant_, init.kaiming_uniform_), writes),
    **dict.fromkeys(named(_WRITE_ALL, torch), write_all),
    **dict.fromkeys(named(_WRITE_UNSEEN, torch), writes_unseen),
    Tensor.__setitem__: writes,
    **dict.fromkeys((F.embedding, F.embedding_bag), embedding),
    **dict.fromkeys((Tensor.data_ptr, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__), address),
    Tensor.__cuda_array_interface__.__get__: address,
    **dict.fromkeys((Tensor.data.__get__, Tensor.data.__set__), unversioned_alias),  # type: ignore[attr-defined]
    **dict.fromkeys(named(NEW, torch, Tensor, torch.special), new),
    **dict.fromkeys(named("cat concat concatenate stack hstack vstack dstack".split(), torch), joined),
    **dict.fromkeys((torch.arange, torch.zeros, torch.ones, torch.full), factory),
    **dict.fromkeys(named(NEW_FUNCTIONAL, F, torch, Tensor), new),
    **dict.fromkeys(named(MAY_ALIAS, torch, Tensor), may_alias),
    Tensor.__eq__: new,  # modules have one, too
    **{f: wide(n, False) for n, names in WIDENED.items() for f in named(names, torch, Tensor, F, torch.special)},
    **{f: wide(n, True) for n, names in WIDENED_WITHIN.items() for f in named(names, torch, Tensor, F, torch.special)},
    **dict.fromkeys(named("silu elu selu celu mish hardswish hardsigmoid".split(), F), may_write),
}
