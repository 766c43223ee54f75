"""Copies of small parameters as they are now, one for all that need it.

FSDP2 frees parameters when their block's forward ends, and gathers them again only for that block's backward, while the
next block may need what was made from them before. And optimizers write to them through ``.data``, which no version
tells.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_memsave.tape.handles import Held, Lent
from hf_memsave.tape.private import copy_each, no_modes
from hf_memsave.tape.tensors import place_of


def copy_of(tape: Any, parameter: Tensor) -> Held | Lent:
    """What goes on the tape instead of the parameter."""
    key = place_of(parameter)
    handle: Held | Lent | None = tape.copies.get(key)
    if handle is None:
        handle = tape.copies[key] = tape.keep(parameter.detach().clone())
    elif isinstance(handle, Lent):
        handle.uses += 1
    return handle


def copy_all(tape: Any, parameters: list[Tensor]) -> None:
    """Make what :func:`copy_of` each would make, in one launch, unless a hook outside asks for one at a time."""
    new = [p for p in parameters if place_of(p) not in tape.copies]
    if not new or tape.outer is not None:
        return
    with no_modes(), torch.no_grad():
        copies = [torch.empty_like(p) for p in new]
        copy_each(copies, new)
    tape.copies.update({place_of(p): Held(copy) for p, copy in zip(new, copies, strict=True)})


def has_copy(tape: Any, parameter: Tensor) -> bool:
    """Whether :func:`copy_of` made one already."""
    return place_of(parameter) in tape.copies
