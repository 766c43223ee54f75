"""What a call writes to, as its arguments say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from hf_memsave.tape.private import written_by


def targets(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that ``out=`` names, and with ``inplace`` the first argument."""
    yield from _tensors(kwargs.get("out"))
    if kwargs.get("inplace") or any(a is True for a in args):
        yield from _tensors(args[0] if args else kwargs.get("input"))


def targets_of_op(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an op of ``torch.ops`` writes to."""
    for place, name in written_by(op):
        yield from _tensors(args[place] if place < len(args) else kwargs.get(name))


def _tensors(argument: Any) -> Iterator[Tensor]:
    for one in argument if isinstance(argument, (list, tuple)) else [argument]:
        if isinstance(one, Tensor):
            yield one
