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

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_memsave.tape.autocast import converted, low
from hf_memsave.tape.decide import cost
from hf_memsave.tape.functions import argument, may_write, named, sees_writes, writes_in_place
from hf_memsave.tape.handles import Blank, Handle
from hf_memsave.tape.private import any_autocast
from hf_memsave.tape.tape import MADE, Tape
from hf_memsave.tape.tensors import is_dense, place_of, with_stride


def convolution(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``F.conv1d`` to ``3d`` and ``F.conv_transpose1d`` to ``3d``: keep no x where the weight is frozen."""
    if len(args) < 2 or not tape.is_innermost():
        return func(*args, **kwargs)
    if any_autocast() and torch.is_autocast_enabled(args[0].device.type):
        args, kwargs = converted(partial(low, tape), args, kwargs)
    weight = args[1]
    if weight.requires_grad or weight.is_complex():  # which is several convolutions of reals
        return func(*args, **kwargs)
    storage = weight.untyped_storage()

    def code(tensor: Tensor) -> Handle | None:
        return None if tensor.untyped_storage() is storage else Blank(tensor)

    with tape.using(coder=code):
        return func(*args, **kwargs)


@sees_writes
def batch_norm(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``F.batch_norm``: running statistics are stock's, and recomputing y must not touch them."""
    names = enumerate(("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"))
    x, mean, var, weight, bias, training, _, eps = (argument(args, kwargs, place, name) for place, name in names)
    if not (torch.is_grad_enabled() and tape.is_innermost()):
        return statistics_alone(tape, func, args, kwargs)
    wants = weight is not None and weight.requires_grad
    if not (wants or (training and x.requires_grad)):
        with tape.using(coder=lambda t: Blank(t) if t.shape == x.shape else None):
            return statistics_alone(tape, func, args, kwargs)
    y = statistics_alone(tape, func, args, kwargs)
    statistics = (None, None) if training else (mean, var)
    tape.record(y, F.batch_norm, (x, *statistics, weight, bias, bool(training), 0.0, 1e-5 if eps is None else eps))
    return y


@sees_writes
def statistics_alone(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``F.batch_norm`` and ``torch.batch_norm`` without a record: in training they write to statistics."""
    first = 3 if func is torch.batch_norm else 1
    if argument(args, kwargs, 5, "training"):
        for place, name in ((first, "running_mean"), (first + 1, "running_var")):
            if (statistic := argument(args, kwargs, place, name)) is not None:
                tape.before_write(statistic)
                tape.mark_unversioned(statistic)
    return func(*args, **kwargs)


def shape_alone(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle average pools and paddings, whose backward reads nothing of what they keep but its shape."""
    if not args or not tape.is_innermost():
        return func(*args, **kwargs)
    with tape.using(coder=Blank):
        y = func(*args, **kwargs)
    is_same = func is F.pad and type(y) in MADE and y.dtype is args[0].dtype  # else autocast has converted its input
    if is_same and y.untyped_storage() is not args[0].untyped_storage():
        tape.record(y, func, args, kwargs)
    return y


def max_pool(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``F.max_pool1d`` to ``3d``: keep indices as places in their windows."""
    if argument(args, kwargs, 6, "return_indices") or not tape.is_innermost():
        return func(*args, **kwargs)
    shape, rank = argument(args, kwargs, 0, "input").shape, int(func.__name__[-2])
    kernel = argument(args, kwargs, 1, "kernel_size")
    stride = argument(args, kwargs, 2, "stride")
    padding, dilation = argument(args, kwargs, 3, "padding", 0), argument(args, kwargs, 4, "dilation", 1)

    def code(tensor: Tensor) -> Handle:
        if tensor.is_floating_point():
            return Blank(tensor)
        options = kernel, kernel if stride is None or not np.size(stride) else stride, padding, dilation
        windows = Windows(shape[-rank:], *(np.broadcast_to(option, rank).tolist() for option in options))
        return tape.keep_instead(tensor, windows.places(tensor), partial(windows.indices, stride=tensor.stride()))

    with tape.using(coder=code):
        return func(*args, **kwargs)


class Windows:
    """The windows of a max pool: size, kernel, stride, padding and dilation of each pooled dimension."""

    def __init__(self, *options: Sequence[int]) -> None:
        self.dimensions = list(zip(*options, strict=True))
        window = math.prod(options[1])  # whose elements the smallest integers tell apart
        self.dtype = torch.uint8 if window <= 2**8 else torch.int16 if window <= 2**15 else torch.int32

    def places(self, indices: Tensor) -> Tensor:
        """Return ``indices`` ``[*, *windows]`` as places in each window, counted like the indices; exact."""
        # A part of the first dimension at a time: on the way an index takes four times its 8 bytes.
        return torch.cat([self._places(part) for part in indices.split(max(1, len(indices) // 16))])

    def _places(self, indices: Tensor) -> Tensor:
        places, count, rest = torch.zeros_like(indices), 1, indices
        for size, kernel, dilation, start in self._from_last(indices):
            places += (rest % size - start) // dilation * count
            rest, count = rest // size, count * kernel
        return places.to(self.dtype)

    def indices(self, places: Tensor, stride: tuple[int, ...]) -> Tensor:
        """Return the int64 indices that have these places, laid out in memory as ``stride`` says."""
        rest, count = places.to(torch.int64), 1
        indices = torch.zeros_like(rest)
        for size, kernel, dilation, start in self._from_last(places):
            indices += (rest % kernel * dilation + start) * count
            rest, count = rest // kernel, count * size
        return with_stride(indices, stride)

    def _from_last(self, pooled: Tensor) -> Iterator[tuple[int, int, int, Tensor]]:
        """Yield size, kernel, dilation and the windows' starts of each pooled dimension, the last one first."""
        for before, (size, kernel, stride, padding, dilation) in enumerate(reversed(self.dimensions)):
            start = torch.arange(pooled.shape[-1 - before], device=pooled.device) * stride - padding
            yield size, kernel, dilation, start.view(-1, *[1] * before)


class Side(NamedTuple):
    """A rectifier's inside, where ``slope(ones, tensor, *bounds)`` is not 0: backward may read ``inside`` there."""

    slope: Callable[..., Tensor]
    bounds: tuple[Any, ...]
    inside: float = math.inf
    outside: float = -math.inf

    def flags(self, tensor: Tensor) -> Tensor:
        """Return which elements of ``tensor`` lie inside."""
        return self.slope(tensor.new_ones(()).expand(tensor.shape), tensor, *self.bounds) != 0


def _above(threshold: float = 0.0) -> Side:
    return Side(torch.ops.aten.threshold_backward, (float(threshold),))


def _between(min_val: float = -1.0, max_val: float = 1.0) -> Side | None:
    if not math.isfinite(min_val + max_val):  # no number lies outside a bound that is infinite
        return None
    least, most = float(min_val), float(max_val)
    return Side(torch.ops.aten.hardtanh_backward, (least, most), (least + most) / 2, math.inf)


_ABOVE_ZERO = Side(torch.ops.aten.leaky_relu_backward, (0.0, False))


def rectifier(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ReLU, ReLU6, Hardtanh, LeakyReLU and Threshold: dx = dy f'(x), and f' is constant inside and outside."""
    if not args:
        return may_write(tape, func, args, kwargs)
    is_in_place = writes_in_place(args, kwargs)
    if is_in_place:
        tape.before_write(args[0])
    bounds = {name: a for name, a in kwargs.items() if name in ("threshold", "min_val", "max_val")}
    make, count = _SIDES[func]
    side = make(*args[1 : 1 + count], **bounds)
    if side is None or not tape.is_innermost():
        return func(*args, **kwargs)
    with tape.using(coder=partial(_as_side, tape, side)):
        y = func(*args, **kwargs)
    if not is_in_place and type(y) in MADE:
        tape.record(y, func, args, kwargs)
    return y


@torch.no_grad()
def _as_side(tape: Tape, side: Side, tensor: Tensor) -> Handle | None:
    """Keep each element's side in one bit; return None where having ``tensor`` itself in backward takes less."""
    content = tape.content_of(tensor)
    if content is None or tape.is_kept(tensor) or not tensor.is_floating_point() or not is_dense(tensor):
        return None
    if tape.call_that_made(tensor) is not None and cost(tape, tensor) <= tensor.numel() // 8:
        return None
    notes, key = tape.notes(tensor), (side, *place_of(tensor))
    if key in notes and (known := notes[key]()) is not None and known.nbytes_code:
        return known
    calls: list[int] = []
    freed = content.freed_by_keeping(tensor._version, calls)
    tape.calls.used.update(calls)
    if freed + tensor.numel() // 8 >= tensor.untyped_storage().nbytes():
        return None
    decode = partial(_from_side, unpack=tape.frame.coders.unpack_bits, side=side, like=Blank(tensor))
    handle = tape.keep_instead(tensor, tape.frame.coders.pack_bits(side.flags(tensor.detach())), decode)
    notes[key] = weakref.ref(handle)
    return handle


def _from_side(bits: Tensor, unpack: Callable[..., Tensor], side: Side, like: Blank) -> Tensor:
    flags = unpack(bits, like.shape.numel()).view(like.shape)
    inside, outside = (torch.full((), s, dtype=like.dtype, device=bits.device) for s in (side.inside, side.outside))
    return with_stride(torch.where(flags, inside, outside), like.stride)


#: Rectifier -> what makes its :class:`Side`, and how many positional arguments, after the first, that takes.
_SIDES: dict[Any, tuple[Callable[..., Side | None], int]] = {
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu), (_above, 0)),
    F.relu6: (lambda: _between(0.0, 6.0), 0),
    F.hardtanh: (_between, 2),
    F.leaky_relu: (lambda: _ABOVE_ZERO, 0),
    **dict.fromkeys((F.threshold, torch.threshold), (_above, 1)),
}

RECTIFIERS = frozenset(_SIDES)
SELECTIVE = {
    F.batch_norm: batch_norm,
    torch.batch_norm: statistics_alone,
    F.pad: shape_alone,
    **dict.fromkeys(_SIDES, rectifier),
    **dict.fromkeys(named(["conv1d", "conv2d", "conv3d"], F), convolution),
    **dict.fromkeys(named(["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"], F), convolution),
    **dict.fromkeys(named(["avg_pool1d", "avg_pool2d", "avg_pool3d"], F), shape_alone),
    **dict.fromkeys(named(["adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"], F), shape_alone),
    **dict.fromkeys(named(["max_pool1d", "max_pool2d", "max_pool3d"], F, torch), max_pool),
}
