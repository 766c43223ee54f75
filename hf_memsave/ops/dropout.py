r"""``dropout``: ``nn.Dropout`` whose mask is drawn again, or kept in one bit an element.

Forward, with q = 1 - p, and backward::

    y = x * m / q       m ~ Bernoulli(q), from the model's own generator, exactly as stock draws it
    dx = dy * m / q

Kept for backward::

    eager    m / q in x's dtype (CPU) or m as a byte (CUDA), and y in the next linear
    "seed"   the generator's state before the draw: 5056 bytes (CPU), 16 bytes (CUDA); y is promised
    "mask"   one bit an element; y is promised

Exact: the same masks in the same order, so a run with dropout equals stock's. On CPU drawing again takes about as long
as drawing did; on CUDA it is one cheap kernel. Source: Chen et al. (2016), arXiv:1604.06174; Tempo, arXiv:2210.10246.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_memsave.ops.op import Binding, KeptBytes, Op
from hf_memsave.tape import Tape, current, promise, promised
from hf_memsave.tape.codecs import pack_bits, unpack_bits
from hf_memsave.tape.promise import is_dense
from hf_memsave.tape.storage import as_activation

_STATE_BYTES = {"cpu": 5056, "cuda": 16}


def dropout_reference(x: Tensor, p: float) -> Tensor:
    """The tests' ground truth."""
    return F.dropout(x, p, training=True)


def kept_bytes(shape: tuple[int, ...], itemsize: int, how: str = "seed", device: str = "cpu") -> KeptBytes:
    """The dropout of ``shape`` and the linear after it, beyond the dropout's input (which "here" keeps, once)."""
    n = torch.Size(shape).numel()
    mask = n * (itemsize if device == "cpu" else 1)
    return KeptBytes(mask + n * itemsize, _STATE_BYTES[device] if how == "seed" else -(-n // 8))


def dropout(x: Tensor, p: float, how: str = "seed") -> Tensor:
    """``F.dropout(x, p, training=True)``, promised; the mask is kept as ``how`` says ("seed" or "mask")."""
    tape = current()
    if not 0 < p < 1 or not x.numel() or tape is None:
        return F.dropout(x, p, training=True)
    if x.device.type == "cpu":
        return promised(torch.mul, x, _noise(x, p, how))
    if x.is_cuda and _can_redraw(x):
        return _FusedDropout.apply(x, p, how, tape)
    return F.dropout(x, p, training=True)


# On CPU, F.dropout draws the scaled mask into a tensor like x, then multiplies.


def _noise(x: Tensor, p: float, how: str) -> Tensor:
    state = torch.default_generator.get_state()
    noise = _draw(None, like=torch.empty_like(x, requires_grad=False), p=p)
    shape, stride, dtype = noise.shape, noise.stride(), noise.dtype
    if how == "seed":
        return promise(noise, partial(_redraw, shape=shape, stride=stride, dtype=dtype, p=p), state)
    bits = pack_bits(_in_memory_order(noise) != 0)
    return promise(noise, partial(_from_bits, shape=shape, stride=stride, dtype=dtype, p=p), bits)


def _draw(generator: torch.Generator | None, like: Tensor, p: float) -> Tensor:
    return like.bernoulli_(1 - p, generator=generator).div_(1 - p)


def _redraw(state: Tensor, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, p: float) -> Tensor:
    generator = torch.Generator()  # a private one: backward must not disturb the model's
    generator.set_state(state)
    return _draw(generator, torch.empty_strided(shape, stride, dtype=dtype), p)


def _from_bits(bits: Tensor, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, p: float) -> Tensor:
    noise = torch.empty_strided(shape, stride, dtype=dtype)
    _in_memory_order(noise).copy_(unpack_bits(bits, noise.numel())).div_(1 - p)
    return noise


def _in_memory_order(dense: Tensor) -> Tensor:
    return dense.as_strided((dense.numel(),), (1,))


# On CUDA, F.dropout is one fused kernel that returns its boolean mask.


class _FusedDropout(torch.autograd.Function):
    """``torch.native_dropout``, whose mask and output are promised before autograd keeps them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, how: str, tape: Tape) -> Tensor:
        state = _cuda_generator(x.device).get_state()
        y, mask = torch.native_dropout(x, p, True)
        if how == "seed":
            tape.promise(mask, partial(_redraw_cuda, like=_Like(x), p=p), (state,))
        else:
            shape, stride = mask.shape, mask.stride()
            bits = pack_bits(_in_memory_order(mask))
            tape.promise(mask, partial(_mask_from_bits, shape=shape, stride=stride), (bits,))
        tape.promise(y, partial(_apply_mask, p=p), (as_activation(x.detach()), mask))
        ctx.save_for_backward(mask)
        ctx.scale = 1.0 / (1.0 - p)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (mask,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(dy, mask, ctx.scale), None, None, None


class _Like:
    """Shape, layout and device of a tensor, without the tensor."""

    def __init__(self, x: Tensor) -> None:
        self.shape, self.stride, self.dtype, self.device = x.shape, x.stride(), x.dtype, x.device

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def _cuda_generator(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _can_redraw(x: Tensor) -> bool:
    # How the kernel hands out random numbers depends on layout and alignment: those of a fresh tensor must do.
    return is_dense(x) and x.data_ptr() % 16 == 0 and not torch.cuda.is_current_stream_capturing()


def _redraw_cuda(state: Tensor, like: _Like, p: float) -> Tensor:
    # The fused kernel draws from the device's default generator only: lend it the old state for one call.
    generator = _cuda_generator(like.device)
    now = generator.get_state()
    try:
        generator.set_state(state)
        return torch.native_dropout(like.empty(), p, True)[1]
    finally:
        generator.set_state(now)


def _mask_from_bits(bits: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    mask = torch.empty_strided(shape, stride, dtype=torch.bool, device=bits.device)
    _in_memory_order(mask).copy_(unpack_bits(bits, mask.numel()))
    return mask


def _apply_mask(x: Tensor, mask: Tensor, p: float) -> Tensor:
    return torch.ops.aten.native_dropout_backward(x, mask, 1.0 / (1.0 - p))


def _dropout(module: nn.Dropout, binding: Binding, input: Tensor) -> Tensor:
    if not module.training:
        return binding.stock.forward(module, input)
    return dropout(input, module.p, binding.value)


def _check(module: nn.Dropout, names: Mapping[str, str]) -> str | None:
    return "it works in place (inplace=True), so its input is gone" if module.inplace else None


DROPOUT = Op("dropout", "dropout", _dropout, _check)
