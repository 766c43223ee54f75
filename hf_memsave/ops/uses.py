"""Where a parameter is used, read off autograd's graph.

Not off the module: casts and what is compiled stand in the graph too, and hooks on what a linear gives run in it. Only
hooks on the transposed weight or on nodes, which are not set, would not be seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from hf_memsave.errors import PatchError
from hf_memsave.tape.private import FakeTensor, is_linear, kept_input

_ACCUMULATE, _CAST, _TRANSPOSED = "torch::autograd::AccumulateGrad", "ToCopyBackward0", "TBackward0"

#: A node of a graph, and which of its outputs.
_Edge = tuple[Any, int]


class Linear(NamedTuple):
    """Where a parameter takes part in ``y = x w^T + b``.

    Attributes:
        node: Of the graph, with y's gradient.
        input: x ``[T, H]``, for a weight; None for a bias.
    """

    node: Any
    input: Tensor | None


def linears_of(y: Tensor, x: Tensor, parameters: Sequence[Tensor]) -> dict[int, Linear]:
    """Which of ``parameters`` take part in one linear of x's and nowhere else, cast or not.

    Returns:
        That linear, by the parameter's id.

    Raises:
        PatchError: What y is computed from is neither x nor a parameter.
    """
    graph = _Graph(y, [x, *parameters])
    run = graph.above(_edge(x))
    found = {}
    for parameter in parameters:
        linear = graph.linear(parameter)
        if linear is not None and linear.node in run:
            found[id(parameter)] = linear
    return found


class _Graph:
    """Who takes what in the graph of y.

    Args:
        y: Computed from ``inputs``.
        inputs: Where the graph ends.

    Attributes:
        takers: Of each output of a node, the nodes that take it, and at which place among what they take.

    Raises:
        PatchError: Something else that wants a gradient stands in it.
    """

    def __init__(self, y: Tensor, inputs: Sequence[Tensor]) -> None:
        ends = {_edge(tensor) for tensor in inputs if tensor.requires_grad}
        nodes = [y.grad_fn] if y.grad_fn is not None else []
        seen = set(nodes)
        self.takers: dict[_Edge, list[tuple[Any, int]]] = {}
        for node in nodes:  # which grows
            if node.name() == _ACCUMULATE:
                raise PatchError(
                    "chunked loss: expected a head whose logits are computed from its input and its own parameters, "
                    "got one that uses other tensors that want a gradient, and would get none. Use "
                    "MemSaveConfig(loss='stock')."
                )
            for place, edge in enumerate(node.next_functions):
                self.takers.setdefault(edge, []).append((node, place))
                if edge[0] is not None and edge not in ends and edge[0] not in seen:
                    seen.add(edge[0])
                    nodes.append(edge[0])

    def above(self, edge: _Edge) -> set[Any]:
        """All nodes that the gradient of an output comes through."""
        over: dict[Any, set[Any]] = {}
        for (node, _), takers in self.takers.items():
            over.setdefault(node, set()).update(taker for taker, _ in takers)
        nodes = [taker for taker, _ in self.takers.get(edge, ())]
        found = set(nodes)
        for node in nodes:  # which grows
            new = over.get(node, set()) - found
            found |= new
            nodes.extend(new)
        return found

    def linear(self, parameter: Tensor) -> Linear | None:
        """The one linear that takes a parameter, through casts and a transpose that nothing else takes."""
        edge, is_weight = _edge(parameter), False
        while len(takers := self.takers.get(edge, [])) == 1:
            ((node, place),) = takers
            if node.name() == _TRANSPOSED and not is_weight:
                is_weight = True
            elif node.name() != _CAST:
                break
            edge = node, 0
        else:
            return None
        if not is_linear(node):
            return None
        if not is_weight:
            is_bias = place == 0 and parameter.dim() == 1 and parameter.numel() > 1  # one number may be for all
            return Linear(node, None) if is_bias else None
        x = kept_input(node) if place == len(node.next_functions) - 1 else None
        if x is None or type(x) not in (Tensor, FakeTensor) or x.device != parameter.device:
            return None
        return Linear(node, x.detach())


def _edge(tensor: Tensor) -> _Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def refuse_others(y: Tensor, inputs: Sequence[Tensor]) -> None:
    """Make sure that nothing but these wants a gradient of y.

    Raises:
        PatchError: Something does.
    """
    _Graph(y, inputs)
