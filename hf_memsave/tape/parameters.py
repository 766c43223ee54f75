"""Parameters and buffers: they are there whatever a tape keeps, but others write to them, and take them away.

FSDP2 frees parameters when their block's forward ends, and gathers them again only for that block's backward, while
the next block may need what was made from them before. And optimizers write to them through ``.data``, which no version
tells. So of small ones a copy goes on the tape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_memsave.tape.content import BUFFER, Content
from hf_memsave.tape.private import OpOverload, copy_each, no_modes
from hf_memsave.tape.recomputed import RecomputedProduct
from hf_memsave.tape.storage import Storages
from hf_memsave.tape.tensors import place_of

#: Conversions: what a parameter is converted to, its own module needs, so the parameter is there in backward.
CASTS = frozenset({Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double})


class Sharded(Content):
    """The content of a parameter whose storage a sharding engine fills, empties and moves.

    One that ``is_per_module`` is there only while its own module runs, forward or backward, and not as long as its
    block. ``gather`` has the engine bring it back in backward; None where the engine cannot.
    """

    is_sharded = True
    #: Any parameter of this process was per module: from then on tapes copy small ones as they see them.
    any_is_per_module = False

    def __init__(self, is_per_module: bool, gather: Callable[[], None] | None = None) -> None:
        super().__init__(None)
        self.is_per_module, self.gather = is_per_module, gather
        Sharded.any_is_per_module |= is_per_module


def copy_of(storages: Storages, parameter: Tensor) -> Content:
    """Return the copy that goes on the tape instead of a small parameter or a buffer, one for all uses."""
    content = storages.copies.get(place := _place(storages, parameter))
    if content is None:
        return _keep_copy(storages, place, parameter.detach().clone())
    content.uses += 1
    return content


def copy_per_module(storages: Storages, func: Any, seen: Iterable[tuple[Tensor, int]]) -> None:
    """Copy parameters among the arguments of ``func`` that are there only while their own module runs."""
    for x, _ in seen:
        if (x.dim() <= 1 or isinstance(func, RecomputedProduct)) and (theirs := storages.content_of(x)).is_per_module:
            if is_copied(x, theirs, func):
                copy_of(storages, x)


def copy_all(storages: Storages, parameters: list[Tensor]) -> None:
    """Make the copies that :func:`copy_of` would, in one launch; none where a hook outside asks for one at a time."""
    new = [p for p in parameters if not has_copy(storages, p)] if storages.outer is None else []
    with no_modes(), torch.no_grad():
        copies = [torch.empty_like(p) for p in new]
        if new:
            copy_each(copies, new)
    for p, copy in zip(new, copies, strict=True):
        _keep_copy(storages, _place(storages, p), copy)


def _keep_copy(storages: Storages, place: tuple[Any, ...], copy: Tensor) -> Content:
    content = storages.copies[place] = storages.keep(copy)
    storages.note_code(content, copy.nbytes, "copy of a parameter")
    return content


def has_copy(storages: Storages, parameter: Tensor) -> bool:
    """Return whether :func:`copy_of` made one already."""
    return _place(storages, parameter) in storages.copies


def _place(storages: Storages, parameter: Tensor) -> tuple[Any, ...]:
    """Return a key for a parameter, or a view of one; not by its storage where ZeRO-3 gives it another each time."""
    is_whole = Sharded.any_is_per_module and parameter.is_leaf and storages.content_of(parameter).is_per_module
    return (id(parameter), parameter._version) if is_whole else place_of(parameter)


def gathers_of(storages: Storages, args: Iterable[Any]) -> Any:
    """Return functions that bring back, in backward, what an engine takes away of ``args``; None if it cannot."""
    if storages.root.mark_of is None:
        return ()
    marks = [mark for a in args if isinstance(a, Tensor) and isinstance(mark := storages.content_of(a), Sharded)]
    found: Any = dict.fromkeys(m.gather for m in marks if m.gather or m.is_per_module)  # in order on every rank
    return None if None in found else found


def is_available(storages: Storages, x: Tensor, content: Content, func: Any) -> bool:
    """Return whether a call of ``func`` will have its parameter or buffer ``x`` in backward."""
    # For one per module, only its copy tells: a recomputed block may find it at other times than its forward did.
    if not content.is_per_module and (x.untyped_storage().nbytes() or not x.numel()):
        return True
    if is_copied(x, content, func):
        return has_copy(storages, x)
    return content.is_per_module or bool(getattr(func, "gathers", ()))


def is_copied(x: Tensor, content: Content, func: Any) -> bool:
    """Return whether, to recompute ``func``, a copy of its parameter or buffer ``x`` is kept, and not ``x`` itself."""
    if x.dim() <= 1 or (content.is_per_module and isinstance(func, RecomputedProduct) and not func.gathers):
        return True
    return may_change(x, content, func)


def may_change(x: Tensor, content: Content, func: Any) -> bool:
    """Return whether ``x`` may have other values in backward though no version tells: by ``.data``, FSDP2 or EMA."""
    if content is BUFFER:
        return x.is_floating_point() and not is_local(func)  # whole numbers are not updated: weights in 4 bits, say
    return content.owner is None and func not in CASTS and not is_local(func)


def is_local(func: Any) -> bool:
    """Return whether ``func`` reads a parameter that its own module's backward needs: a product, or dequantizing."""
    return func is F.linear or isinstance(func, (OpOverload, RecomputedProduct))
