"""Masks: one bit an element instead of a tensor, unless something else keeps that tensor anyway.

ReLU's backward reads only the sign of its output. Where a trained convolution keeps that output too, stock's two
consumers share it, and a mask beside it would be a waste. Who comes later is not known when ReLU runs. So the mask
marks the storage that it stands for: when the tape keeps that storage as it is, the mask gives way and shares it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from hf_memsave.tape.codecs import pack_bits, unpack_bits
from hf_memsave.tape.promise import Fetch, Keep, is_dense, is_plain, with_stride

_MASKS = "_memsave_masks"
_KEPT = "_memsave_kept_version"


class Mask:
    """On which side of a bound each element of a tensor lies.

    Args:
        tensor: What was to be kept; dense.
        flags: The side of each element, bool.
        sides: What backward may read instead where the flag is set, and where it is not.
        keep: That of the tape.
    """

    __slots__ = ("shape", "stride", "offset", "dtype", "version", "sides", "held", "fetch", "__weakref__")

    def __init__(self, tensor: Tensor, flags: Tensor, sides: tuple[float, float], keep: Keep) -> None:
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        self.dtype, self.version, self.sides = tensor.dtype, tensor._version, sides
        self.held = keep(pack_bits(flags))
        self.fetch: Fetch | None = None  # set as the mask gives way
        storage = tensor.untyped_storage()
        setattr(storage, _MASKS, [*getattr(storage, _MASKS, ()), weakref.ref(self)])

    def give_way(self, kept: Tensor, handle: Any, fetch: Fetch) -> None:
        """Hold ``handle``, that of ``kept`` on the same storage, instead of the bits, unless it was written to."""
        if kept._version == self.version and kept.dtype == self.dtype:
            self.held, self.fetch = handle, fetch

    def get(self, fetch: Fetch) -> Tensor:
        """The tensor itself, or one whose elements lie on the same sides."""
        if self.fetch is not None:
            return self.fetch(self.held).as_strided(self.shape, self.stride, self.offset)
        held = fetch(self.held)
        flags = unpack_bits(held, self.shape.numel()).view(self.shape)
        yes, no = (torch.tensor(side, dtype=self.dtype, device=held.device) for side in self.sides)
        return with_stride(torch.where(flags, yes, no), self.stride)


def saves_bytes(tensor: Tensor) -> bool:
    """Whether a mask can stand for ``tensor``, and nothing keeps it yet."""
    is_kept = is_plain(tensor) and getattr(tensor.untyped_storage(), _KEPT, None) == tensor._version
    return is_plain(tensor) and is_dense(tensor) and not is_kept


def note_kept(tensor: Tensor, handle: Any, fetch: Fetch) -> None:
    """Called with each tensor that is kept as it is, what it is kept as, and how to get it back: its masks give way.

    The masks may have been made under another hook, whose ``fetch`` is another one.
    """
    if not is_plain(tensor):
        return
    storage = tensor.untyped_storage()
    setattr(storage, _KEPT, tensor._version)
    for ref in getattr(storage, _MASKS, ()):
        if (mask := ref()) is not None:
            mask.give_way(tensor, handle, fetch)
