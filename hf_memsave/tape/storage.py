"""Storage: activations that have to be kept, kept in 8 or 4 bits an element (:mod:`~hf_memsave.tape.quantize`).

Precedence: what is remade keeps nothing. Of what has to be kept, a sampled linear keeps rows, a rectifier or few-bit
activation its bits. Whatever floating-point activation then still reaches the tape is coded, once per storage: a code
is a node (which decodes it), so it is shared, versioned and dropped like any other. Parameters, their casts, integers,
small tensors and the statistics of norms are kept as they are. NaN and infinity come back as they were.

SDPA's backward computes exp(q·k) again, which 4 bits would bias by 10% and more: its q, k, v and output take 8 bits
under int4 too, and so do the log probabilities of the loss. Masks of SDPA are never coded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_memsave.device import new_generator
from hf_memsave.tape.codecs import Whole, coded
from hf_memsave.tape.handles import Handle, Ticket
from hf_memsave.tape.quantize import FORMATS, Format
from hf_memsave.tape.record import Record
from hf_memsave.tape.tensors import is_dense

#: Elements of a tensor below which a code is not worth its launches.
SMALLEST = 512
_CODED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class Encoder:
    """Chooses what of one forward is coded, and codes it, by draws of its own for each block and forward."""

    def __init__(self, kind: str, index: int, forward: int) -> None:
        self.form = FORMATS[kind]
        self.seed = hash((torch.initial_seed(), index, forward)) & (2**63 - 1)
        self.generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, tape: Any, record: Record, storage: Any, tensor: Tensor) -> Handle | None:
        """What goes on the tape for ``tensor``; None to keep it as it is."""
        if not _is_activation(tensor, record):
            return None
        mine = tensor.detach()
        if not is_dense(mine):
            if mine.numel() * mine.itemsize >= storage.nbytes():  # some of its elements are the same: no code is less
                return None
            mine = mine.contiguous()
        flat = mine.as_strided((mine.numel(),), (1,), mine.storage_offset())
        form = FORMATS["int8"] if tape.is_in_attention or tape.is_in_loss else self.form
        geometry = mine.shape, mine.stride(), mine.dtype
        remake = partial(_decoded, decode=tape.coders.decode, form=form, geometry=geometry)
        codes = tape.coders.encode(flat, form, self._generator(flat.device))
        return Ticket(coded(tape, record, storage, mine, remake, codes, is_lossy=True), Whole(mine))

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self.generators:
            self.generators[device] = new_generator(device, self.seed)
        return self.generators[device]


def _is_activation(tensor: Tensor, record: Record) -> bool:
    is_statistic = tensor.dim() == 0 or tensor.shape[-1] == 1
    if tensor.dtype not in _CODED or tensor.numel() < SMALLEST or is_statistic:
        return False
    return record.is_activation or tensor.requires_grad


def _decoded(
    codes: Tensor, bounds: Tensor, decode: Callable[..., Tensor], form: Format, geometry: tuple[Any, ...]
) -> Tensor:
    shape, stride, dtype = geometry
    flat = decode(codes, bounds, form, shape.numel(), dtype)
    return flat.as_strided(shape, stride)
