"""Codecs: tensors are kept as codes of fewer bytes, and decoded in backward.

Booleans take one bit an element, where PyTorch keeps a byte. With ``storage="int8"`` or ``"int4"``, floating-point
activations that have to be kept take 8 or 4 bits an element (:mod:`~hf_memsave.tape.quantize`), once per storage.
Parameters, their casts, integers, small tensors and the statistics of norms are kept as they are.

SDPA's backward recomputes exp(q·k), which 4 bits would bias by 10% and more: its q, k, v and output take 8 bits
under int4 too, and so do the log probabilities of the loss. Masks of SDPA are never coded.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_memsave.device import new_generator
from hf_memsave.tape.content import Content, Ticket
from hf_memsave.tape.handles import Blank, Handle
from hf_memsave.tape.quantize import FORMATS, Format
from hf_memsave.tape.storage import Storages
from hf_memsave.tape.tensors import is_dense

#: Fewest booleans that are packed into bits.
SMALLEST = 4096
#: Attribute of booleans' storage: a function that returns the tape that coded them, None once its forward is over.
CODED_IN = "_memsave_coded_in"
#: Fewest elements of a tensor that is coded: for fewer, a code is not worth its launches.
SMALLEST_CODED = 512
_CODED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def coded(
    storages: Storages, content: Content, storage: Any, tensor: Tensor, decode: Callable[..., Tensor],
    codes: tuple[Tensor, ...], is_lossy: bool,
) -> Content:  # fmt: skip
    """Return a content that gives dense ``tensor`` as ``decode(*codes)``, and views of ``storage`` if it spans that."""
    code = Content(storages.lock)
    code.become(decode, [storages.keep(c) for c in codes])
    code.is_lossy = is_lossy
    code.stride, code.nbytes = tensor.stride(), tensor.numel() * tensor.itemsize
    if code.nbytes == storage.nbytes():
        code.version, code.dtype = tensor._version, tensor.dtype
        storages.link(storage, code, content)
    storages.note_code(code, sum(c.nbytes for c in codes), "code")
    return code


def as_bits(storages: Storages, content: Content, storage: Any, tensor: Tensor) -> Handle | None:
    """Keep one bit for each byte of a boolean tensor's storage, for all views; return None where that saves nothing."""
    if not SMALLEST <= storage.nbytes() <= 2 * tensor.numel() or not is_dense(tensor):
        return None
    coded_in = getattr(storage, CODED_IN, None)
    if coded_in is not None and coded_in() is not storages.root:  # kept beyond a forward: bits would come on top
        return None
    setattr(storage, CODED_IN, weakref.ref(storages.root))
    flags = tensor.detach().as_strided((storage.nbytes(),), (1,), 0)
    decode = partial(storages.frame.coders.unpack_bits, numel=flags.numel())
    code = coded(storages, content, storage, flags, decode, (storages.frame.coders.pack_bits(flags),), is_lossy=False)
    return Ticket(code, tensor)


def leave_alone(held: Any, depth: int = 4) -> None:
    """Exempt the booleans in ``held`` and in containers in it from coding: the caller may keep them until backward."""
    if isinstance(held, Tensor):
        if held.dtype is torch.bool:
            with contextlib.suppress(NotImplementedError, RuntimeError):  # it is sparse, or of a transform
                setattr(held.untyped_storage(), CODED_IN, lambda: None)
    elif depth and isinstance(held, (list, tuple, Mapping)):
        for inner in held.values() if isinstance(held, Mapping) else held:
            leave_alone(inner, depth - 1)


class Encoder:
    """Choose which activations are coded, and code them, by random draws of its own for each block and forward."""

    def __init__(self, kind: str, index: int, forward: int) -> None:
        self.form = FORMATS[kind]
        self.seed = hash((torch.initial_seed(), index, forward)) & (2**63 - 1)
        self.generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, storages: Storages, content: Content, storage: Any, tensor: Tensor) -> Handle | None:
        """Return what goes on the tape for ``tensor``; None to keep it as it is."""
        is_statistic = tensor.dim() == 0 or tensor.shape[-1] == 1
        is_coded = tensor.dtype in _CODED and tensor.numel() >= SMALLEST_CODED and not is_statistic
        if not is_coded or not (content.is_activation or tensor.requires_grad):
            return None
        mine = tensor.detach()
        if not is_dense(mine):
            if mine.numel() * mine.itemsize >= storage.nbytes():  # some of its elements are the same: no code is less
                return None
            mine = mine.contiguous()
        flat = mine.as_strided((mine.numel(),), (1,), mine.storage_offset())
        form = FORMATS["int8"] if storages.frame.is_in_attention or storages.frame.is_in_loss else self.form
        remake = partial(_decoded, decode=storages.frame.coders.decode, form=form, like=Blank(mine))
        if (generator := self.generators.get(flat.device)) is None:
            generator = self.generators[flat.device] = new_generator(flat.device, self.seed)
        codes = storages.frame.coders.encode(flat, form, generator)
        ticket = Ticket(coded(storages, content, storage, mine, remake, codes, is_lossy=True), mine)
        ticket.offset = 0  # the decoded tensor has a storage of its own
        return ticket


def _decoded(codes: Tensor, bounds: Tensor, decode: Callable[..., Tensor], form: Format, like: Blank) -> Tensor:
    return decode(codes, bounds, form, like.shape.numel(), like.dtype).as_strided(like.shape, like.stride)
