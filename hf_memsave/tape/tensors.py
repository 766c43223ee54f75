"""Geometry, classes and graphs of tensors, and which arguments of a call are tensors."""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_memsave.tape.private import FakeTensor


class View:
    """The geometry of a tensor, without its bytes; a sparse one has neither strides nor an offset."""

    __slots__ = ("shape", "_stride", "_offset", "dtype", "version", "is_flipped")

    def __init__(self, tensor: Tensor) -> None:
        is_strided = tensor.layout is torch.strided
        self.shape, self._stride = tensor.shape, tensor.stride() if is_strided else ()
        self._offset = tensor.storage_offset() if is_strided else 0
        self.dtype, self.version, self.is_flipped = tensor.dtype, tensor._version, is_flipped(tensor)

    def stride(self) -> tuple[int, ...]:
        """Return the strides of the tensor."""
        return self._stride

    def storage_offset(self) -> int | torch.SymInt:
        """Return the offset of the tensor in its storage."""
        return self._offset

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether ``tensor``, on the same storage, has this geometry and version."""
        theirs = View(tensor)
        return all(getattr(self, name) == getattr(theirs, name) for name in View.__slots__)


def is_flipped(tensor: Tensor) -> bool:
    """Return whether the storage has the conjugate or the negative of the tensor's values."""
    return tensor.is_neg() or (tensor.dtype.is_complex and tensor.is_conj())


def is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor's bytes are its storage's: not of a class that may wrap others (DTensor, torchao's)."""
    kind = type(tensor)
    if kind not in _PLAIN:
        has_own = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
        _PLAIN[kind] = not has_own and not is_traceable_wrapper_subclass(tensor)
    return _PLAIN[kind]


_PLAIN: dict[type, bool] = {Tensor: True, nn.Parameter: True, FakeTensor: True}


def is_asked(kind: Any) -> bool:
    """Return whether a class of tensors has its own ``__torch_function__``, but no ``__torch_dispatch__``."""
    if kind in (Tensor, FakeTensor) or not issubclass(kind, Tensor) or not inspect.ismethod(kind.__torch_function__):
        return False
    return bool(kind.__torch_dispatch__ is Tensor.__torch_dispatch__)


#: Types of arguments that contain no tensor, and that cannot change later.
CONSTANT = frozenset(
    {float, int, bool, str, slice, type(None), type(...), torch.dtype, torch.device, torch.memory_format, torch.layout}
)
_BOUNDS = {int, type(None)}


def plain_tensors(args: Iterable[Any]) -> list[tuple[Tensor, int]] | None:
    """Return the tensors in ``args``, in order, and their versions; None if one is sparse or anything may change."""
    found = []
    for a in args:
        kind = type(a)
        if kind is Tensor or kind is nn.Parameter:
            if a.layout is not torch.strided:  # it has no storage
                return None
            found.append((a, a._version))
        elif kind is tuple or kind is torch.Size:
            if (inner := plain_tensors(a)) is None:
                return None
            found += inner
        elif kind not in CONSTANT or (kind is slice and not {type(a.start), type(a.stop), type(a.step)} <= _BOUNDS):
            return None
    return found


def owned(argument: Any) -> Any:
    """Return ``argument`` with copies of its lists, arrays and bounds of slices, which their owner may change later."""
    if type(argument) is slice:
        return slice(*(b if b is None else operator.index(b) for b in (argument.start, argument.stop, argument.step)))
    if isinstance(argument, (list, tuple)):
        items = [owned(a) for a in argument]
        return items if isinstance(argument, list) else tuple(items)
    if type(argument) is dict:
        return {k: owned(a) for k, a in argument.items()}
    return copy.copy(argument) if isinstance(argument, np.ndarray) else argument


def leaves(args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors among the arguments of a call, and in lists of them, in order."""
    found = []
    for a in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(a, Tensor):
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found += leaves(a, None)
    return found


def with_stride(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return ``tensor``, or a copy that lies in memory as ``stride`` says: the bits of some sums depend on it."""
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def unexpanded(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or the part of it that ``expand`` has repeated."""
    stride = tensor.stride() if tensor.layout is torch.strided and is_plain(tensor) else ()
    if 0 not in stride or not tensor.numel():
        return tensor
    return tensor[tuple([slice(None, 1) if s == 0 else slice(None) for s in stride])]


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements lie side by side in memory, in any order, without overlap."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def tensors_in(values: Iterable[Any]) -> Iterable[Tensor]:
    """Yield the tensors among the arguments of a model, and one level below."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (v for v in value if isinstance(v, Tensor))


def nodes_before(tensors: Iterable[Tensor], seen: Iterable[Any] = ()) -> Iterator[Any]:
    """Yield the autograd nodes that ``tensors`` depend on, each once, but not through those ``seen`` already."""
    known: set[Any] = {None, *seen}
    todo: list[Any] = [tensor.grad_fn for tensor in tensors]
    while todo:
        if (node := todo.pop()) not in known:
            known.add(node)
            todo += [before for before, _ in node.next_functions]
            yield node


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that tells ``tensor``, as it is now, from all others of which the storages are alive."""
    geometry = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    return id(tensor.untyped_storage()), *geometry, tensor._version
