"""Selective differentiation: convolutions, batch norms, pools, paddings and rectifiers keep what wanted gradients need.

                       stock keeps                                here
    convolution        x, also where the weight is frozen         x where the weight wants a gradient
    batch norm (eval)  x                                          x where the weight wants a gradient
    average pool, pad  x, for its shape                           nothing
    maximum pool       x for its shape, and indices in int64      their places in the windows, mostly a byte each
    rectifier          y (ReLU) or x                              what x is made from, where that adds less than a bit
                                                                  an element; else x, where another keeps it; else bits

Stock's own operation runs, with its own backward, and only what it keeps is replaced: so gradients, second derivatives
and every option of it are stock's. Exact. Source: Bhatia & Dangel (2024), 2.2.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_memsave.tape.content import Blank, Handle
from hf_memsave.tape.functions import MADE, may_write, sees_writes
from hf_memsave.tape.private import any_autocast
from hf_memsave.tape.special import low
from hf_memsave.tape.tape import Tape
from hf_memsave.tape.tensors import is_dense, with_stride


def _coded(tape: Tape, code: Callable[[Tensor], Handle | None], func: Any, args: Any, kwargs: Any) -> Any:
    """Run one operation; for each tensor that it asks to keep, ``code`` chooses what goes on the tape."""
    before, tape.coder = tape.coder, code
    try:
        return func(*args, **kwargs)
    finally:
        tape.coder = before


def convolution(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``F.conv1d`` to ``3d`` and ``F.conv_transpose1d`` to ``3d``."""
    if len(args) < 2 or not tape.is_innermost():
        return func(*args, **kwargs)
    x, weight, *rest = args
    if any_autocast() and torch.is_autocast_enabled(x.device.type):
        rest = [low(tape, a) if isinstance(a, Tensor) else a for a in rest]
        weight = low(tape, weight)
        x = low(tape, x)  # last, in the order of autocast's own conversions
        kwargs = {name: low(tape, a) if isinstance(a, Tensor) else a for name, a in kwargs.items()}
    args = x, weight, *rest
    if weight.requires_grad or weight.is_complex():  # which is several convolutions of reals
        return func(*args, **kwargs)
    storage = weight.untyped_storage()

    def code(tensor: Tensor) -> Handle | None:
        return None if tensor.untyped_storage() is storage else Blank(tensor)

    return _coded(tape, code, func, args, kwargs)


@sees_writes
def batch_norm(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``F.batch_norm``: running statistics are stock's; remaking y must not touch them."""
    x, mean, var, weight, bias, training, eps = _of_batch_norm(*args, **kwargs)
    _before_statistics(tape, mean, var, training)
    if not (torch.is_grad_enabled() and tape.is_innermost()):
        return func(*args, **kwargs)
    wants = weight is not None and weight.requires_grad
    if not (wants or (training and x.requires_grad)):
        shape = x.shape
        return _coded(tape, lambda t: Blank(t) if t.shape == shape else None, func, args, kwargs)
    y = func(*args, **kwargs)
    statistics = (None, None) if training else (mean, var)
    tape.record(y, F.batch_norm, (x, *statistics, weight, bias, training, 0.0, eps))
    return y


@sees_writes
def statistics_alone(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``F.batch_norm`` where nothing is recorded."""
    _, mean, var, _, _, training, _ = _of_batch_norm(*args, **kwargs)
    _before_statistics(tape, mean, var, training)
    return func(*args, **kwargs)


@sees_writes
def torch_batch_norm(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.batch_norm``: nothing is recorded, but its writes are seen."""
    _before_statistics(tape, *_statistics_of_torch(*args, **kwargs))
    return func(*args, **kwargs)


def _before_statistics(tape: Tape, mean: Tensor | None, var: Tensor | None, training: bool) -> None:
    """In training they are written to, without a version to tell."""
    for statistic in (mean, var):
        if training and statistic is not None:
            tape.before_write(statistic)
            tape.mark_unversioned(statistic)


def _statistics_of_torch(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, *rest: Any, **named: Any
) -> Any:
    return running_mean, running_var, training


def _of_batch_norm(
    input: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    return input, running_mean, running_var, weight, bias, training, eps


def shape_alone(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Average pools and paddings, whose backward reads nothing of what they keep but its shape."""
    if not args or not tape.is_innermost():
        return func(*args, **kwargs)
    y = _coded(tape, Blank, func, args, kwargs)
    is_same = func is F.pad and type(y) in MADE and y.dtype is args[0].dtype  # else autocast has converted its input
    if is_same and y.untyped_storage() is not args[0].untyped_storage():
        tape.record(y, func, args, kwargs)
    return y


def max_pool(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``F.max_pool1d`` to ``3d``."""
    x, keeps_indices, *options = _of_max_pool(*args, **kwargs)
    if keeps_indices or not tape.is_innermost():
        return func(*args, **kwargs)
    rank = int(func.__name__[-2])

    def code(tensor: Tensor) -> Handle:
        if tensor.is_floating_point():
            return Blank(tensor)
        kernel, stride, padding, dilation = [_per_dimension(option, rank) for option in options]
        windows = Windows(x.shape[-rank:], kernel, stride or kernel, padding, dilation)
        return tape.stand_in(tensor, windows.places(tensor), partial(windows.indices, stride=tensor.stride()))

    return _coded(tape, code, func, args, kwargs)


def _per_dimension(option: Any, rank: int) -> tuple[int, ...]:
    """A pool's option as PyTorch reads it: one number for all dimensions, or one for each; or nothing."""
    if option is None:
        return ()
    numbers = [int(number) for number in (option if isinstance(option, (tuple, list)) else [option])]
    return tuple(numbers * rank if len(numbers) == 1 else numbers)


def _of_max_pool(
    input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:  # fmt: skip
    return input, return_indices, kernel_size, stride, padding, dilation


class Windows:
    """The windows of a max pool: an index into the input takes 8 bytes, its place in the window mostly one.

    ``dimensions`` has of each pooled one its size, and the kernel, stride, padding and dilation.
    """

    def __init__(self, *dimensions: Sequence[int]) -> None:
        self.dimensions = list(zip(*dimensions, strict=True))
        window = math.prod(dimensions[1])  # whose elements the smallest integers tell apart
        self.dtype = torch.uint8 if window <= 2**8 else torch.int16 if window <= 2**15 else torch.int32

    def places(self, indices: Tensor) -> Tensor:
        """``indices`` ``[*, *windows]`` as places in each window, counted like the indices; exact."""
        places, count, rest = torch.zeros_like(indices), 1, indices
        for size, kernel, dilation, start in self._from_last(indices):
            places += (rest % size - start) // dilation * count
            rest, count = rest // size, count * kernel
        return places.to(self.dtype)

    def indices(self, places: Tensor, stride: tuple[int, ...]) -> Tensor:
        """The int64 indices that have these places, laid out in memory as ``stride`` says."""
        rest, count = places.to(torch.int64), 1
        indices = torch.zeros_like(rest)
        for size, kernel, dilation, start in self._from_last(places):
            indices += (rest % kernel * dilation + start) * count
            rest, count = rest // kernel, count * size
        return with_stride(indices, stride)

    def _from_last(self, pooled: Tensor) -> Iterator[tuple[int, int, int, Tensor]]:
        """Of each pooled dimension, the last one first: size, kernel, dilation, and where each window starts."""
        for before, (size, kernel, stride, padding, dilation) in enumerate(reversed(self.dimensions)):
            start = torch.arange(pooled.shape[-1 - before], device=pooled.device) * stride - padding
            yield size, kernel, dilation, start.view(-1, *[1] * before)


class Side(NamedTuple):
    """Which numbers lie inside, where ``slope(ones, tensor, *bounds)`` is not zero.

    Backward may read ``inside`` for any number inside, and ``outside`` for others.
    """

    slope: Callable[..., Tensor]
    bounds: tuple[Any, ...]
    inside: float = math.inf
    outside: float = -math.inf

    def flags(self, tensor: Tensor) -> Tensor:
        """Which elements lie inside."""
        return self.slope(tensor.new_ones(()).expand(tensor.shape), tensor, *self.bounds) != 0


def _above(threshold: float = 0.0, *_: Any) -> Side:
    return Side(torch.ops.aten.threshold_backward, (float(threshold),))


def _above_zero(*_: Any, **__: Any) -> Side:
    return Side(torch.ops.aten.leaky_relu_backward, (0.0, False))


def _between(min_val: float = -1.0, max_val: float = 1.0, *_: Any) -> Side | None:
    if not math.isfinite(min_val + max_val):  # no number lies outside a bound that is infinite
        return None
    least, most = float(min_val), float(max_val)
    return Side(torch.ops.aten.hardtanh_backward, (least, most), (least + most) / 2, math.inf)


def rectifier(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """ReLU, ReLU6, Hardtanh, LeakyReLU and Threshold: dx = dy f'(x), and f' has one value inside and one outside."""
    if not args:
        return may_write(tape, func, args, kwargs)
    is_in_place = bool(kwargs.get("inplace")) or any(a is True for a in args[1:])
    if is_in_place:
        tape.before_write(args[0])
    numbers = [a for a in args[1:] if type(a) is not bool]
    named = {name: a for name, a in kwargs.items() if name in ("threshold", "min_val", "max_val")}
    side = _SIDES[func](*numbers, **named)
    if side is None or not tape.is_innermost():
        return func(*args, **kwargs)
    y = _coded(tape, partial(_as_side, tape, side), func, args, kwargs)
    if not is_in_place and type(y) in MADE:
        tape.record(y, func, args, kwargs)
    return y


@torch.no_grad()
def _as_side(tape: Tape, side: Side, tensor: Tensor) -> Handle | None:
    """On which side each element lies, in one bit; None where having the tensor takes less than its bits."""
    content = tape.content_of(tensor)
    if content is None or tape.is_kept(tensor) or not tensor.is_floating_point() or not is_dense(tensor):
        return None
    tape.plan.asked.add(content.made)
    if content.func is not None and tape.cost(tensor) <= tensor.numel() // 8:
        return None
    geometry = tensor.shape, tensor.stride(), tensor.dtype
    notes, key = tape.notes(tensor), (side, *geometry, tensor.storage_offset(), tensor._version)
    if key in notes and (known := notes[key]()) is not None and known.nbytes_code:
        return known
    if content.nbytes_let_go(tensor._version) + tensor.numel() // 8 >= tensor.untyped_storage().nbytes():
        return None
    decode = partial(_from_side, unpack=tape.coders.unpack_bits, side=side, geometry=geometry)
    handle = tape.stand_in(tensor, tape.coders.pack_bits(side.flags(tensor.detach())), decode)
    notes[key] = weakref.ref(handle)
    return handle


def _from_side(bits: Tensor, unpack: Callable[..., Tensor], side: Side, geometry: tuple[Any, ...]) -> Tensor:
    shape, stride, dtype = geometry
    flags = unpack(bits, shape.numel()).view(shape)
    inside, outside = (torch.full((), s, dtype=dtype, device=bits.device) for s in (side.inside, side.outside))
    return with_stride(torch.where(flags, inside, outside), stride)


_SIDES: dict[Any, Callable[..., Side | None]] = {
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu), lambda: _above(0.0)),
    F.relu6: lambda: _between(0.0, 6.0),
    F.hardtanh: _between,
    F.leaky_relu: _above_zero,
    **dict.fromkeys((F.threshold, torch.threshold), _above),
}

RECTIFIERS = frozenset(_SIDES)
SELECTIVE = {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), convolution),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), convolution),
    F.batch_norm: batch_norm,
    torch.batch_norm: torch_batch_norm,
    **dict.fromkeys((F.avg_pool1d, F.avg_pool2d, F.avg_pool3d), shape_alone),
    **dict.fromkeys((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d), shape_alone),
    F.pad: shape_alone,
    **dict.fromkeys((F.max_pool1d, F.max_pool2d, F.max_pool3d), max_pool),
    **dict.fromkeys((torch.max_pool1d, torch.max_pool2d, torch.max_pool3d), max_pool),
    **dict.fromkeys(_SIDES, rectifier),
}
