"""Functions of rows of logits, recorded so that they can be computed for some rows at a time.

A :class:`Node` is a function of rows that other nodes give, and of numbers by row. Its values ``[n, V]`` for some rows
are computed when they are asked for, and dropped; nothing changes a node, so they are always the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_memsave.device import has_numbers
from hf_memsave.tape.handles import written


class ByRow:
    """Numbers ``[T, k]`` for all rows of the head's input, in their order."""

    def __init__(self, of: Tensor) -> None:
        self.of, self.version = of, of._version

    def at(self, part: Part) -> Tensor:
        """Return the numbers of a part; raise KeptTensorChangedError if the tensor was written to after the forward."""
        if self.of._version != self.version:
            raise written(self.of, self.version)
        return self.of[part.index]


class RowMap:
    """The rows of the head's input that the rows of a tensor belong to."""

    def __init__(self, rows: np.ndarray, dim: int, parent: RowMap | None = None) -> None:
        self.rows, self.dim = rows, dim  # row numbers, in the tensor's shape with one word; the dimension of its words
        self.parent, self.flat = parent, rows.reshape(-1)  # the map of the whole, if of a part; the numbers in order

    def shape(self, words: int) -> tuple[int, ...]:
        """Return the tensor's shape for so many words."""
        return (*self.rows.shape[: self.dim], words, *self.rows.shape[self.dim + 1 :])

    def probe(self) -> Tensor:
        """Return the row numbers, repeated for two words, so that a view of them shows where its rows and words are."""
        return torch.from_numpy(self.rows).expand(self.shape(2))

    def of_view(self, probe: Tensor, shape: torch.Size, words: int) -> RowMap | None:
        """Return the map of a view of this shape; ``probe`` is the same view of the probe. None if it splits rows."""
        dims = [d for d in range(probe.dim()) if probe.stride(d) == 0 and probe.shape[d] == 2]
        if len(dims) != 1:
            return None
        own = RowMap(probe.narrow(dims[0], 0, 1).numpy().copy(), dims[0], self)
        known = next((other for other in (self, self.parent) if other and other.is_at(own)), own)
        return known if shape == own.shape(words) else None

    def is_at(self, other: RowMap) -> bool:
        """Return whether ``other`` has the same rows at the same places."""
        return self is other or (self.dim == other.dim and np.array_equal(self.rows, other.rows))

    def by_row(self, numbers: Tensor, count: int) -> Tensor:
        """Return ``numbers``, k for each row here, as ``[T, k]`` in the order of all ``count`` rows, else zero."""
        own = numbers.movedim(self.dim, -1).reshape(-1, numbers.shape[self.dim])
        if np.array_equal(self.flat, np.arange(count)) or not has_numbers(own):
            return own
        every, at = own.new_zeros(count, own.shape[1]), torch.from_numpy(self.flat).to(own.device)
        return every.index_copy_(0, at, own)

    def shaped(self, own: Tensor) -> Tensor:
        """Return ``own`` ``[n, k]`` in the tensor's shape, with k numbers for each row here."""
        lead = [n for d, n in enumerate(self.rows.shape) if d != self.dim]
        return own.view(*lead, own.shape[-1]).movedim(-1, self.dim)


class Precomputed(NamedTuple):
    """The head's gradients, which a loss has computed in forward: see :mod:`.chunked_loss`."""

    finish: Callable[[], tuple[Tensor | None, dict[int, Tensor | None]]]  # returns dx, and parameters' gradients by id
    node: Node  # the function of logits whose gradient leads to them
    rows: np.ndarray  # all rows of the loss


class Part(NamedTuple):
    """Some rows: their numbers in the head's input, the first and last number, and their places among all asked."""

    index: Any  # a slice or numbers
    span: tuple[int, int]
    here: slice


class Node:
    """A function of rows: ``func`` of ``args``, which are nodes, :class:`ByRow`, or the same for all rows."""

    def __init__(self, func: Any, *args: Any, kept: Precomputed | None = None, rows: np.ndarray | None = None) -> None:
        self.func, self.args, self.kept = func, args, kept
        self.rows = rows  # if not None, all others are zero
        sizes = [arg.size for arg in args if isinstance(arg, Node)]
        #: How many tensors as large as logits there are at once, at most, while its values are computed.
        self.size: int = 2 + 2 * max(sizes) if func is sum else 1 + sum(sizes)


#: The head's output.
LOGITS = Node(Tensor.detach)


def parts_of(rows: np.ndarray, step: int, x: Tensor) -> Iterator[Part]:
    """Yield these rows of x, ``step`` at a time."""
    for start in range(0, len(rows), step)[: None if has_numbers(x) else 2]:  # the others have as many bytes
        own = rows[start : start + step]
        first, last = int(own.min()), int(own.max())
        is_run = not has_numbers(x) or (np.diff(own) == 1).all()
        index = slice(first, first + len(own)) if is_run else torch.from_numpy(own).to(x.device)
        yield Part(index, (first, last), slice(start, start + len(own)))


def zero_outside(node: Node, rows: np.ndarray, count: int, x: Tensor) -> Node:
    """Return ``node`` with zeros in all of the ``count`` rows of x that are not among ``rows``."""
    if len(rows) == count or not has_numbers(x):
        return node
    mask = np.zeros((count, 1), dtype=np.bool_)
    mask[rows] = True
    rows = np.sort(rows)
    kept = node.kept if node.kept is not None and np.array_equal(np.sort(node.kept.rows), rows) else None
    by_row = ByRow(torch.from_numpy(mask).to(x.device))
    return Node(lambda z, mask: z.where(mask, 0), node, by_row, kept=kept, rows=rows)


def union(nodes: Sequence[Any]) -> np.ndarray | None:
    """Return the rows outside of which all of these nodes are zero; None for all rows."""
    some = [node.rows for node in nodes if isinstance(node, Node) and node.rows is not None]
    return np.unique(np.concatenate(some)) if len(some) == len(nodes) else None


def values(node: Node, part: Part, logits: Callable[[], Tensor]) -> Tensor:
    """Compute the values ``[n, V]`` of ``node`` for some rows, whose logits ``logits()`` returns."""
    return _values(node, part, cache(logits), {})


def _values(node: Node, part: Part, logits: Callable[[], Tensor], known: dict[Node, Tensor]) -> Tensor:
    if node is LOGITS:
        return logits()
    if node not in known:
        if node.func is sum:  # one after the other, and none that is zero there
            here = [arg for arg in node.args if _reaches(arg, part)] or node.args[:1]
            known[node] = sum((_values(arg, part, logits, {}) for arg in here[1:]), _values(here[0], part, logits, {}))
        else:
            args = [_values(arg, part, logits, known) if isinstance(arg, Node) else arg for arg in node.args]
            known[node] = node.func(*(arg.at(part) if isinstance(arg, ByRow) else arg for arg in args))
    return known[node]


def _reaches(node: Node, part: Part) -> bool:
    return node.rows is None or (node.rows[0] <= part.span[1] and part.span[0] <= node.rows[-1])
