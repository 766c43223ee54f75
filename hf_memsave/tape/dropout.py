r"""Dropout in every spelling: its mask is drawn again, or kept in one bit an element.

Forward, with q = 1 - p, and backward::

    y = x * m / q       m ~ Bernoulli(q), from the model's own generator, exactly as stock draws it
    dx = dy * m / q

Kept for backward, beside x, from which y is recomputed::

    eager    m / q in x's dtype (CPU) or m as a byte (CUDA), and y in the next linear
    "seed"   the generator's state before the draw: 5056 bytes (CPU), 16 bytes (CUDA)
    "mask"   one bit an element
    "auto"   CUDA: the state. CPU: bits
    "small"  CUDA: the state. CPU: what takes fewer bytes

Exact. On CPU drawing again takes about as long as drawing did, ten times as long as reading bits, and a mask is kept in
bits where another thread drew between the reading of the state and the mask. On CUDA it is one cheap kernel, which
draws from the device's default generator: threads that train take turns at it, but others that draw from it do not.
Source: Chen et al. (2016), arXiv:1604.06174; Tempo, arXiv:2210.10246.
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
from hf_memsave.tape.handles import Blank
from hf_memsave.tape.private import after_backward, backward_id, in_transform, is_concrete, outside_transforms
from hf_memsave.tape.tape import Tape
from hf_memsave.tape.tensors import is_dense, is_plain

#: For alpha dropout: the value that SELU saturates at, negated.
_SATURATION = 1.7580993408473766
#: Bytes of a state of CPU's generator.
_STATE = 5056
_ALPHA = frozenset({F.alpha_dropout, torch.alpha_dropout})
#: Dropouts of whole channels -> dimensions of a batch: any other input, stock refuses or takes for one sample.
_OF_CHANNELS = {F.dropout1d: 3, F.dropout2d: None, F.dropout3d: 5, torch.feature_dropout: None}


def dropout(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Handle any function of :data:`DROPOUTS`: keep its mask as bits, or as the generator's state to draw it again."""
    x, p, training, inplace = dropout_arguments(*args, **kwargs)
    if inplace:
        tape.before_write(x)
    draws = training is True and 0 < p < 1 and tape.frame.dropout != "stock"
    if not draws or not isinstance(x, Tensor) or not is_plain(x) or not x.numel() or x.is_complex():
        return func(*args, **kwargs)
    if func in _OF_CHANNELS:
        if inplace or x.dim() < 3 or x.dim() != (_OF_CHANNELS[func] or x.dim()):
            return func(*args, **kwargs)
        noise = x.new_empty(*x.shape[:2], *[1] * (x.dim() - 2)).bernoulli_(1 - p).div_(1 - p)
        return tape.call(torch.mul, x, noise)  # which is small
    if in_transform() or (inplace and func in _ALPHA):
        return func(*args, **kwargs)
    if x.device.type == "cpu":
        if func not in _ALPHA:
            return tape.call(Tensor.mul_ if inplace else torch.mul, x, _noise(tape, x, p))
        a = 1.0 / math.sqrt((_SATURATION * _SATURATION * p + 1) * (1 - p))  # keeps mean and variance of SELU's output
        mask = _noise(tape, x, p, is_scaled=False)
        shift = mask.add(-1).mul_(_SATURATION * a).add_(_SATURATION * a * p)
        return tape.call(torch.mul, x, tape.call(torch.mul, mask, a)).add_(shift)
    if not inplace and func not in _ALPHA and fuses_dropout(x) and can_redraw(x):
        return _fused(tape, x, p)
    return func(*args, **kwargs)


def dropout_arguments(input: Any, p: Any = 0.5, training: Any = True, inplace: Any = False, train: Any = None) -> Any:
    """Return input, p, training and inplace of a call of any plain dropout, as stock reads them."""
    p = float(p) if isinstance(p, Tensor) else p
    return input, p, training if train is None else train, inplace


def _noise(tape: Tape, like: Tensor, p: float, is_scaled: bool = True) -> Tensor:
    noise, again, kept = drawn(tape, like, p, like.dtype, is_scaled)
    tape.record(noise, again, kept)
    return noise


def drawn(tape: Tape, like: Tensor, p: float, dtype: torch.dtype, is_scaled: bool = True) -> Any:
    """Return ``noise``, ``again`` and ``kept``: ``again(*kept)`` is ``noise``, to the bit.

    That is what stock's dropout multiplies dense ``like`` with on CPU, drawn as stock draws it, and equal in any
    ``dtype``. Elements that are not zero are 1 / (1 - p) if it ``is_scaled``, else 1. The frame says what to keep.
    """
    how = tape.frame.dropout
    nbytes = like.numel() * dtype.itemsize if how == "seed" else like.numel() // 8
    is_state = how in ("seed", "small") and nbytes > _STATE
    # Other threads draw from the model's generator too, so its state is read, and never set.
    state = torch.default_generator.get_state() if is_state else None
    mask = torch.empty_like(like, dtype=torch.uint8, requires_grad=False).bernoulli_(1 - p)
    scaled = partial(_scaled, dtype=dtype, p=p if is_scaled else 0.0)
    if state is not None and _begins_at(state, mask, p):
        return scaled(mask), partial(_redraw, like=Blank(mask), p=p, scaled=scaled), (state,)
    again, bits = mask_as_bits(tape, mask, scaled)
    return scaled(mask), again, (bits,)


def _scaled(mask: Tensor, dtype: torch.dtype, p: float) -> Tensor:
    noise = mask.to(dtype)
    return noise.div_(1 - p) if p else noise


def mask_as_bits(tape: Tape, mask: Tensor, scaled: Any = None) -> tuple[Callable[..., Tensor], Tensor]:
    """Return a function that decodes ``mask`` in backward, then ``scaled``, and the bits that it decodes."""
    again = partial(_from_bits, unpack=tape.frame.coders.unpack_bits, like=Blank(mask), scaled=scaled)
    return again, tape.frame.coders.pack_bits(mask if mask.is_contiguous() else mask.as_strided((mask.numel(),), (1,)))


def _begins_at(state: Tensor, drawn: Tensor, p: float) -> bool:
    """Return whether ``drawn`` came from ``state``: not if another thread drew after the reading of the state."""
    # So many elements are drawn again that another draw gives the same ones by chance once in e^32 times.
    count = min(drawn.numel(), math.ceil(16 / (p * (1 - p))))
    try:
        generator = torch.Generator("cpu").set_state(state)  # the model's own is left alone
        again = torch.empty(count, dtype=drawn.dtype, device="cpu").bernoulli_(1 - p, generator=generator)
        return torch.equal(drawn.as_strided((count,), (1,)), again)
    except RuntimeError:
        if is_concrete(drawn):
            raise
        return False


def _redraw(state: Tensor, like: Blank, p: float, scaled: Callable[[Tensor], Tensor]) -> Tensor:
    with outside_transforms():
        mask = torch.empty_strided(like.shape, like.stride, dtype=torch.uint8, device="cpu")
        return scaled(mask.bernoulli_(1 - p, generator=torch.Generator("cpu").set_state(state)))


def _from_bits(bits: Tensor, unpack: Callable[..., Tensor], like: Blank, scaled: Any) -> Tensor:
    mask = unpack(bits, like.shape.numel()).as_strided(like.shape, like.stride)
    return mask if scaled is None else scaled(mask.view(torch.uint8))  # PyTorch converts booleans slowly


#: On CUDA, where F.dropout is one fused kernel: held while a device's default generator is read or lent.
TURN = threading.RLock()


def _fused(tape: Tape, x: Tensor, p: float) -> Tensor:
    if tape.frame.dropout == "mask":
        y, mask = torch.native_dropout(x, p, True)
        unpacked, bits = mask_as_bits(tape, mask)
        tape.record(mask, unpacked, (bits,))
        tape.record(y, torch.ops.aten.native_dropout_backward, (x, mask, scale_of(p, x.dtype)))
        return y
    again = _Redrawn(x, p)

    def code(mask: Tensor) -> Ticket | None:  # autograd asks for the mask while it is drawn
        if mask.dtype is not torch.bool or (content := tape.content_of(mask)) is None:
            return None
        again.is_asked = True
        return Ticket(coded(tape, content, mask.untyped_storage(), mask, again.mask, (state,), is_lossy=False), mask)

    with TURN, tape.using(coder=code):
        state = default_generator(x.device).get_state()
        y, _ = torch.native_dropout(x, p, True)
    tape.record(y, again.output, (x, state))
    return y


def scale_of(p: float, dtype: torch.dtype = torch.float32) -> float:
    """Return the fused kernel's factor, 1 divided by 1 - p, which it rounds to fp32 but for numbers in fp64."""
    return 1.0 / (1.0 - p if dtype is torch.float64 else float(np.float32(1.0 - p)))


class _Redrawn:
    """Draw a dropout of ``x`` again: backward asks for the output first; its mask, if ``is_asked`` for, waits here."""

    def __init__(self, x: Tensor, p: float) -> None:
        self.like, self.p, self.is_asked = Blank(x), p, False
        self.waiting: list[tuple[Tensor, Any]] = []

    def output(self, x: Tensor, state: Tensor) -> Tensor:
        y, mask = redrawn(x, state, self.p)
        if self.is_asked and backward_id() != -1:
            if not self.waiting:  # in a backward for a subset of the gradients, it may never be asked for
                after_backward(partial(_forget, weakref.ref(self)))
            self.waiting[:] = [(mask, current_stream(x.device))]
        return y

    def mask(self, state: Tensor) -> Tensor:
        like = self.like
        mask, stream = self.waiting.pop() if self.waiting else (None, None)
        if mask is not None and mask.stride() == like.stride and stream == current_stream(like.device):
            return mask
        x = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=like.device)
        return redrawn(x, state, self.p)[1]


def _forget(again: weakref.ref[_Redrawn]) -> None:
    if (alive := again()) is not None:
        alive.waiting.clear()


def can_redraw(x: Tensor) -> bool:
    """Return whether :func:`redrawn` draws on CUDA what was drawn for ``x``."""
    # How the kernel hands out random numbers depends on layout and alignment: a fresh tensor's must do.
    return is_dense(x) and is_aligned(x) and not is_capturing(x.device)


def redrawn(x: Tensor, state: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return a dropout of ``x`` and its mask, as they were drawn on CUDA from the generator's ``state``."""
    # The fused kernel draws from the device's default generator only: lend it the old state for one call.
    generator = default_generator(x.device)
    with TURN, outside_transforms():
        now = generator.get_state()
        try:
            generator.set_state(state)
            return torch.native_dropout(x, p, True)
        finally:
            generator.set_state(now)


def mask_of(tape: Tape, like: Tensor, p: float) -> tuple[Tensor, Callable[[], Tensor]]:
    """Draw the boolean mask that stock's dropout draws for ``like``; return it and its redraw."""
    if not fuses_dropout(like):
        mask, again, kept = drawn(tape, like, p, torch.uint8, is_scaled=False)
        return mask, partial(again, *kept)
    with TURN:
        state = default_generator(like.device).get_state()
        return torch.native_dropout(like, p, True)[1], partial(_Redrawn(like, p).mask, state)


def drop(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """Return a dropout of ``x`` by some rows of what :func:`mask_of` drew."""
    if not fuses_dropout(x):
        return x * _scaled(mask.view(torch.uint8), x.dtype, p)
    return torch.ops.aten.native_dropout_backward(x, mask, scale_of(p, x.dtype))


DROPOUTS: dict[Any, Callable[..., Any]] = dict.fromkeys((F.dropout, torch.dropout, *_ALPHA, *_OF_CHANNELS), dropout)
