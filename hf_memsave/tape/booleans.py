"""Booleans that have to be kept, such as the masks of ``torch.where`` and of CUDA's dropout: one bit an element, exact.

PyTorch keeps a byte for each. What a model holds anyway (its buffers, marked by :func:`leave_buffers`) stays as it is.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hf_memsave.tape.codecs import pack_bits, unpack_bits
from hf_memsave.tape.promise import Promise, Ticket, attach

if TYPE_CHECKING:
    from hf_memsave.tape.hooks import Tape

#: Bytes below which bits are not worth their trouble.
SMALLEST = 4096
_BUFFER = "_memsave_buffer"


def leave_buffers(model: nn.Module) -> None:
    """Have the boolean buffers of ``model`` kept as they are: they are alive whether autograd holds them or not."""
    for buffer in model.buffers():
        if buffer.dtype is torch.bool and not buffer.is_meta:
            setattr(buffer.untyped_storage(), _BUFFER, True)


def bits(tensor: Tensor, tape: Tape) -> Ticket | None:
    """A ticket for ``tensor``, a plain one, made from the bits of its storage; None to keep it as it is."""
    if tensor.dtype is not torch.bool:
        return None
    storage = tensor.untyped_storage()
    numel = storage.nbytes()
    if numel < SMALLEST or 2 * tensor.numel() < numel or hasattr(storage, _BUFFER):
        return None
    whole = tensor.detach().as_strided((numel,), (1,), 0)
    promise = Promise(whole, partial(unpack_bits, numel=numel), (pack_bits(whole),), (None,))
    tape.slots.append(weakref.ref(attach(promise, whole, tape)))
    return promise.take(tensor, tape.keep)
