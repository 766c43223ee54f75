r"""Dropout in every spelling: its mask is drawn again, or kept in one bit an element.

Forward, with q = 1 - p, and backward::

    y = x * m / q       m ~ Bernoulli(q), from the model's own generator, exactly as stock draws it
    dx = dy * m / q

Kept for backward::

    eager    m / q in x's dtype (CPU) or m as a byte (CUDA), and y in the next linear
    "seed"   the generator's state before the draw: 5056 bytes (CPU), 16 bytes (CUDA); y is remade from x
    "mask"   one bit an element; y is remade from x

Exact: the same masks in the same order, so a run with dropout equals stock's. On CPU drawing again takes about as long
as drawing did, and a mask is kept in bits where another thread drew between the reading of the state and the mask. On
CUDA it is one cheap kernel, which draws from the device's default generator: threads that train take turns at it, but
one that draws by itself does not. Source: Chen et al. (2016), arXiv:1604.06174; Tempo, arXiv:2210.10246.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_memsave.device import current_stream, default_generator, fuses_dropout, is_aligned, is_capturing
from hf_memsave.tape.codecs import coded
from hf_memsave.tape.content import Ticket
from hf_memsave.tape.private import after_backward, backward_id, in_transform, is_concrete, outside_transforms
from hf_memsave.tape.tape import Tape
from hf_memsave.tape.tensors import is_dense, is_plain

#: Of alpha dropout: what SELU saturates at, negated.
_ALPHA = 1.7580993408473766
#: Dimensions of an input that is one sample without a batch: stock adds the batch in between.
_UNBATCHED = {F.dropout1d: 2, F.dropout3d: 4}


def dropout(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``F.dropout`` and ``torch.dropout``."""
    input, p, training, inplace = _arguments(*args, **kwargs)
    if inplace:
        tape.before_write(input)
    if _is_left(tape, input, p, training) or in_transform():
        return func(*args, **kwargs)
    if input.device.type == "cpu":
        noise = _noise(tape, input, input.shape, p)
        return tape.call(Tensor.mul_ if inplace else torch.mul, input, noise)
    if not inplace and fuses_dropout(input) and _can_redraw(input):
        return _fused(tape, input, p)
    return func(*args, **kwargs)


def channel_dropout(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``F.dropout1d`` to ``3d`` and ``torch.feature_dropout``, which drop whole channels; their noise is small."""
    input, p, training, inplace = _arguments(*args, **kwargs)
    if inplace:
        tape.before_write(input)
    if inplace or _is_left(tape, input, p, training) or input.dim() < 3 or input.dim() == _UNBATCHED.get(func):
        return func(*args, **kwargs)
    noise = input.new_empty(*input.shape[:2], *[1] * (input.dim() - 2)).bernoulli_(1 - p).div_(1 - p)
    return tape.call(torch.mul, input, noise)


def alpha_dropout(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``F.alpha_dropout``: y = x a m + b, with a and b of the mean and variance that SELU's output has."""
    input, p, training, inplace = _arguments(*args, **kwargs)
    if inplace:
        tape.before_write(input)
    if inplace or _is_left(tape, input, p, training) or input.device.type != "cpu" or in_transform():
        return func(*args, **kwargs)
    a = 1.0 / math.sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))
    mask = _noise(tape, input, input.shape, p, is_scaled=False)
    shift = mask.add(-1).mul_(_ALPHA * a).add_(_ALPHA * a * p)
    return tape.call(torch.mul, input, tape.call(torch.mul, mask, a)).add_(shift)


def _is_left(tape: Tape, input: Tensor, p: float, training: bool) -> bool:
    """Whether stock's own function runs: where it draws nothing, is asked for, or draws as a class of its own does."""
    if not training or not 0 < p < 1 or tape.dropout == "stock":
        return True
    return not isinstance(input, Tensor) or not is_plain(input) or not input.numel()


def _arguments(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: Any = None) -> Any:
    p = float(p) if isinstance(p, Tensor) else p  # as stock reads it
    return input, p, training if train is None else train, inplace


def _noise(tape: Tape, like: Tensor, shape: torch.Size, p: float, is_scaled: bool = True) -> Tensor:
    # Other threads draw from the model's generator too, so its state is read, and never set.
    state = torch.default_generator.get_state()
    noise = torch.empty_like(like, requires_grad=False).bernoulli_(1 - p)
    is_drawn_again = tape.dropout == "seed" and noise.is_cpu and _begins_at(state, noise, p)
    if is_scaled:
        noise.div_(1 - p)
    geometry = shape, noise.stride(), noise.dtype
    if is_drawn_again:
        tape.record(noise, partial(_redraw, geometry=geometry, p=p, is_scaled=is_scaled), (state,))
    elif is_dense(noise):
        bits, unpack = tape.coders.pack_bits(_in_memory_order(noise) != 0), tape.coders.unpack_bits
        again = partial(_from_bits, unpack=unpack, geometry=geometry, p=p, is_scaled=is_scaled)
        tape.record(noise, again, (bits,))
    return noise


class _Private(threading.local):
    """A generator of each thread's own: what is drawn from a kept state leaves the model's alone."""

    def __init__(self) -> None:
        self.generator = torch.Generator("cpu")

    def at(self, state: Tensor) -> torch.Generator:
        return self.generator.set_state(state)


_private = _Private()


def _begins_at(state: Tensor, drawn: Tensor, p: float) -> bool:
    """Whether ``drawn`` came from ``state``: not if another thread drew between the state's reading and the draw."""
    # So many elements are drawn again that those of another draw are the same by chance once in e^32 times.
    count = min(drawn.numel(), math.ceil(16 / (p * (1 - p))))
    try:
        again = torch.empty(count, dtype=drawn.dtype, device="cpu").bernoulli_(1 - p, generator=_private.at(state))
        return torch.equal(drawn.as_strided((count,), (1,)), again)
    except RuntimeError:
        if is_concrete(drawn):
            raise
        return False


def _redraw(state: Tensor, geometry: Any, p: float, is_scaled: bool) -> Tensor:
    shape, stride, dtype = geometry
    with outside_transforms():
        noise = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        noise.bernoulli_(1 - p, generator=_private.at(state))
        return noise.div_(1 - p) if is_scaled else noise


def _from_bits(bits: Tensor, unpack: Callable[..., Tensor], geometry: Any, p: float, is_scaled: bool) -> Tensor:
    shape, stride, dtype = geometry
    noise = torch.empty_strided(shape, stride, dtype=dtype, device=bits.device)
    _in_memory_order(noise).copy_(unpack(bits, noise.numel()))
    return noise.div_(1 - p) if is_scaled else noise


def _in_memory_order(dense: Tensor) -> Tensor:
    return dense.as_strided((dense.numel(),), (1,))


# On CUDA, F.dropout is one fused kernel that returns its boolean mask too.

#: Whose turn it is to read or lend a device's default generator.
_turn = threading.RLock()


def _fused(tape: Tape, x: Tensor, p: float) -> Tensor:
    if tape.dropout == "seed":
        return _fused_from_seed(tape, x, p)
    y, mask = torch.native_dropout(x, p, True)
    bits, unpack = tape.coders.pack_bits(_in_memory_order(mask)), tape.coders.unpack_bits
    geometry = mask.shape, mask.stride(), torch.bool
    tape.record(mask, partial(_from_bits, unpack=unpack, geometry=geometry, p=p, is_scaled=False), (bits,))
    tape.record(y, partial(_apply_mask, scale=scale_of(p, x.dtype)), (x, mask))
    return y


def _fused_from_seed(tape: Tape, x: Tensor, p: float) -> Tensor:
    again = _Again(x, p)

    def code(mask: Tensor) -> Ticket | None:  # autograd asks for the mask while it is drawn
        if mask.dtype is not torch.bool or (content := tape.content_of(mask)) is None:
            return None
        again.is_asked = True
        return Ticket(coded(tape, content, mask.untyped_storage(), mask, again.mask, (state,), is_lossy=False), mask)

    before, tape.coder = tape.coder, code
    try:
        with _turn:
            state = default_generator(x.device).get_state()
            y, _ = torch.native_dropout(x, p, True)
    finally:
        tape.coder = before
    tape.record(y, again.output, (x, state))
    return y


def scale_of(p: float, dtype: torch.dtype = torch.float32) -> float:
    """What the fused kernel multiplies with: it divides 1 by 1 - p in fp32, or in fp64 for numbers in fp64."""
    return 1.0 / (1.0 - p if dtype is torch.float64 else float(np.float32(1.0 - p)))


class _Again:
    """Draws a dropout of ``x`` again: backward asks for the output first; its mask waits, if that ``is_asked`` for."""

    def __init__(self, x: Tensor, p: float) -> None:
        self.shape, self.stride, self.dtype, self.device = x.shape, x.stride(), x.dtype, x.device
        self.p, self.is_asked = p, False
        self.waiting: list[tuple[Tensor, Any]] = []

    def output(self, x: Tensor, state: Tensor) -> Tensor:
        y, mask = _drawn_again(x, state, self.p)
        if self.is_asked and backward_id() != -1:
            if not self.waiting:  # in a backward for a subset of the gradients, it may never be asked for
                after_backward(partial(_forget, weakref.ref(self)))
            self.waiting[:] = [(mask, current_stream(self.device))]
        return y

    def mask(self, state: Tensor) -> Tensor:
        mask, stream = self.waiting.pop() if self.waiting else (None, None)
        if mask is not None and mask.stride() == self.stride and stream == current_stream(self.device):
            return mask
        x = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return _drawn_again(x, state, self.p)[1]


def _forget(again: weakref.ref[_Again]) -> None:
    if (alive := again()) is not None:
        alive.waiting.clear()


def _can_redraw(x: Tensor) -> bool:
    # How the kernel hands out random numbers depends on layout and alignment: those of a fresh tensor must do.
    return is_dense(x) and is_aligned(x) and not is_capturing(x.device)


def _drawn_again(x: Tensor, state: Tensor, p: float) -> tuple[Tensor, Tensor]:
    # The fused kernel draws from the device's default generator only: lend it the old state for one call.
    generator = default_generator(x.device)
    with _turn, outside_transforms():
        now = generator.get_state()
        try:
            generator.set_state(state)
            return torch.native_dropout(x, p, True)
        finally:
            generator.set_state(now)


def _apply_mask(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    return torch.ops.aten.native_dropout_backward(x, mask, scale)


DROPOUTS: dict[Any, Callable[..., Any]] = {
    F.dropout: dropout,
    torch.dropout: dropout,
    F.alpha_dropout: alpha_dropout,
    torch.alpha_dropout: alpha_dropout,
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout), channel_dropout),
}
