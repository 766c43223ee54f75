"""What a graph of autograd holds without asking to keep it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from hf_memsave.tape.private import tree_leaves


def nodes_of(out: Any) -> Iterator[Any]:
    """The nodes that a forward's output hangs on, each once."""
    todo: list[Any] = [x.grad_fn for x in _leaves(out) if isinstance(x, Tensor)]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
            yield node


def held_by(node: Any) -> list[Tensor]:
    """The leaf that wants a gradient, or what a Function's context holds beside what it saved."""
    held = _leaves(list(getattr(node, "__dict__", {}).values()))
    held += [x for f in held if isinstance(f, partial) for x in _leaves((f.args, f.keywords))]
    held += [node.variable] if node.name().endswith("AccumulateGrad") else []
    return [x for x in held if isinstance(x, Tensor)]


def is_checkpoint(node: Any) -> bool:
    """Whether it is of a reentrant checkpoint."""
    return "run_function" in getattr(node, "__dict__", {})


def _leaves(tree: Any) -> list[Any]:
    """What lists, tuples and dicts hold, one in the other; nothing where one of them holds itself."""
    with contextlib.suppress(RecursionError):
        return tree_leaves(tree)
    return []
