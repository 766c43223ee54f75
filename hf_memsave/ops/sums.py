"""Gradients of a head's parameters, summed over chunks of its rows as if there were no chunks.

Autograd rounds the gradient that it gives for a chunk to the parameter's dtype, and in bf16 a sum of rounded parts is
further from the truth than one rounded sum. A linear's gradient is the product of what goes in and the gradient of what
comes out: where the graph of a chunk says that a parameter takes part in one linear and nowhere else, that product is
added in fp32. It is read off the graph, not off the module: casts and what is compiled stand in it too, and hooks on
what comes out have run; only hooks on the transposed weight or on nodes, which nobody sets, would not be seen. Hooks on
parameters wait for the whole gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from hf_memsave.device import has_wide_products
from hf_memsave.errors import PatchError
from hf_memsave.tape.private import FakeTensor, is_linear, kept_input, without_hooks

#: Elements of a sum for which a product is computed at once, where it cannot be added in place.
_BLOCK = 2**24
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


class Sums:
    """Sums of gradients over chunks.

    Args:
        parameters: Those that want one.
        wide: The dtype of the sums, unless a parameter's is wider.
    """

    def __init__(self, parameters: Sequence[Tensor], wide: torch.dtype) -> None:
        self.parameters, self.wide = parameters, wide
        self.sums: dict[int, Tensor] = {}
        self.lost: dict[int, Tensor] = {}

    def add(self, y: Tensor, x: Tensor, dy: Tensor) -> Tensor | None:
        """Add what a chunk gives them.

        Args:
            y: Of a chunk, with a graph of its own.
            x: The leaf that it is computed from.
            dy: The gradient of y.

        Returns:
            The gradient of x.

        Raises:
            PatchError: What y is computed from is neither x nor a parameter.
        """
        linears = linears_of(y, x, self.parameters)
        others = [parameter for parameter in self.parameters if id(parameter) not in linears]
        dys: dict[int, Tensor | None] = {}
        hooks = [
            node.register_prehook(lambda given, key=key: dys.update({key: given[0]}))
            for key, (node, _) in linears.items()
        ]
        try:
            with without_hooks(others):
                dx, *found = torch.autograd.grad(y, [x, *others], dy, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        for parameter, gradient in zip(others, found, strict=True):
            if gradient is not None:
                self._of(parameter).add_(gradient)
        for parameter in self.parameters:
            if id(parameter) in linears:
                self._add_linear(parameter, linears[id(parameter)].input, dys.get(id(parameter)))
        return dx

    def rounded(self) -> list[Tensor | None]:
        """In the parameters' dtypes; None for one that no chunk has used."""
        return [self.sums.pop(id(p)).to(p.dtype) if id(p) in self.sums else None for p in self.parameters]

    def _add_linear(self, parameter: Tensor, x: Tensor | None, dy: Tensor | None) -> None:
        if dy is None:
            return
        total = self._of(parameter)
        if x is not None:
            _add_product(total, dy, x)
            return
        lost = self.lost.setdefault(id(parameter), torch.zeros_like(total))
        _add_compensated(total, lost, dy.sum(0, dtype=total.dtype))

    def _of(self, parameter: Tensor) -> Tensor:
        if id(parameter) not in self.sums:
            dtype = torch.promote_types(parameter.dtype, self.wide)
            self.sums[id(parameter)] = torch.zeros_like(parameter, dtype=dtype)
        return self.sums[id(parameter)]


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
        """The one linear that takes a parameter, through casts and a transpose that nobody else takes."""
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
        return Linear(node, x)


def _edge(tensor: Tensor) -> _Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def refuse_others(y: Tensor, inputs: Sequence[Tensor]) -> None:
    """Make sure that nothing but these wants a gradient of y.

    Raises:
        PatchError: Something does.
    """
    _Graph(y, inputs)


def _add_product(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """``total += dy^T x``, for ``[T, V]`` and ``[T, H]``."""
    if not has_wide_products(dy) or dy.dtype == total.dtype or total.dtype != torch.float32:
        total.addmm_(dy.to(total.dtype).t(), x.to(total.dtype))
        return
    step = max(1, _BLOCK // x.shape[1])
    for rows, part in zip(total.split(step), dy.t().split(step), strict=True):
        rows += torch.mm(part, x, out_dtype=total.dtype)


def _add_compensated(total: Tensor, lost: Tensor, part: Tensor) -> None:
    """``total += part``, and what rounding takes from it into ``lost``, for the next time (Kahan, 1965)."""
    part = part - lost
    after = total + part
    torch.sub(after - total, part, out=lost)
    total.copy_(after)
