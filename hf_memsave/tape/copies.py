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
    handle: Held | Lent | None = tape.copies.get(_place(tape, parameter))
    if handle is None:
        handle = _keep(tape, parameter, parameter.detach().clone())
    elif isinstance(handle, Lent):
        handle.uses += 1
    return handle


def copy_all(tape: Any, parameters: list[Tensor]) -> None:
    """Make what :func:`copy_of` each would make, in one launch, unless a hook outside asks for one at a time."""
    new = [p for p in parameters if not has_copy(tape, p)]
    if not new or tape.outer is not None:
        return
    with no_modes(), torch.no_grad():
        copies = [torch.empty_like(p) for p in new]
        copy_each(copies, new)
    for p, copy in zip(new, copies, strict=True):
        _keep(tape, p, copy)


def _keep(tape: Any, parameter: Tensor, copy: Tensor) -> Held | Lent:
    handle: Held | Lent = tape.keep(copy)
    tape.copies[_place(tape, parameter)] = handle
    tape.note_small(handle, copy.nbytes, "copy of a parameter")
    return handle


def has_copy(tape: Any, parameter: Tensor) -> bool:
    """Whether :func:`copy_of` made one already."""
    return _place(tape, parameter) in tape.copies


def _place(tape: Any, parameter: Tensor) -> tuple[Any, ...]:
    """What tells a parameter, or a view of one, from others; ZeRO-3 gives a parameter another storage each time."""
    is_whole = parameter.is_leaf and tape.record_of(parameter).is_brief
    return (id(parameter), parameter._version) if is_whole else place_of(parameter)
