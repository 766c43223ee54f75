"""Gradients of a head's parameters, summed over chunks of its rows as if there were no chunks.

Autograd rounds the gradient that it gives for a chunk to the parameter's dtype, and in bf16 a sum of rounded parts is
further from the truth than one rounded sum. A linear's gradient is the product of what goes in and the gradient of what
comes out: where the graph of a chunk says that a parameter takes part in one linear and nowhere else, that product is
added in fp32. It is read off the graph, not off the module: hooks, casts and what is compiled stand in it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_memsave.device import has_wide_products
from hf_memsave.errors import PatchError
from hf_memsave.tape.private import FakeTensor, is_linear, kept_input

#: Elements of a sum for which a product is computed at once, where it cannot be added in place.
_BLOCK = 2**24
_ACCUMULATE, _CAST, _TRANSPOSED = "torch::autograd::AccumulateGrad", "ToCopyBackward0", "TBackward0"

#: Of each node of a graph: the nodes that take its output, and the place of it among what they take.
_Takers = dict[Any, list[tuple[Any, int]]]


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
        seen: dict[Any, Tensor | None] = {}
        nodes = {linear.node for linear in linears.values()}
        hooks = [node.register_prehook(lambda dys, node=node: seen.update({node: dys[0]})) for node in nodes]
        dx, *found = torch.autograd.grad(y, [x, *others], dy, allow_unused=True)
        for hook in hooks:
            hook.remove()
        for parameter, gradient in zip(others, found, strict=True):
            if gradient is not None:
                self._of(parameter).add_(gradient)
        for parameter in self.parameters:
            if id(parameter) in linears:
                self._add_linear(parameter, linears[id(parameter)].input, seen[linears[id(parameter)].node])
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
    takers = _graph(y)
    leaves = _leaves(takers, [x, *parameters])
    run = _above(leaves.get(id(x)), takers)
    found = {}
    for parameter in parameters:
        linear = _linear(leaves.get(id(parameter)), takers)
        if linear is not None and linear.node in run:
            found[id(parameter)] = linear
    return found


def refuse_others(y: Tensor, inputs: Sequence[Tensor]) -> None:
    """Make sure that nothing but these wants a gradient of y.

    Raises:
        PatchError: Something does.
    """
    _leaves(_graph(y), inputs)


def _graph(y: Tensor) -> _Takers:
    """All nodes that y comes from, and who takes their outputs at which place."""
    takers: _Takers = {y.grad_fn: []}
    nodes = [y.grad_fn]
    for node in nodes:  # which grows
        for place, (source, _) in enumerate(node.next_functions if node else ()):
            if source is not None:
                if source not in takers:
                    takers[source] = []
                    nodes.append(source)
                takers[source].append((node, place))
    return takers


def _leaves(takers: _Takers, known: Sequence[Tensor]) -> dict[int, Any]:
    """The nodes of leaves, by the ids of these."""
    found = {id(node.variable): node for node in takers if node and node.name() == _ACCUMULATE}
    if found.keys() - {id(leaf) for leaf in known}:
        raise PatchError(
            "chunked loss: expected a head whose logits are computed from its input and its own parameters, got one "
            "that uses other tensors that want a gradient, and would get none. Use MemSaveConfig(loss='stock')."
        )
    return found


def _above(node: Any, takers: _Takers) -> set[Any]:
    """All nodes that the gradient of ``node`` comes through."""
    found, nodes = {node}, [node]
    for one in nodes:  # which grows
        new = {taker for taker, _ in takers.get(one, ()) if taker not in found}
        found |= new
        nodes.extend(new)
    return found


def _linear(leaf: Any, takers: _Takers) -> Linear | None:
    """The one linear that takes a leaf's value, through casts and a transpose that nobody else takes."""
    node, is_weight = leaf, False
    while len(takers.get(node, ())) == 1:
        ((node, place),) = takers[node]
        if node.name() == _TRANSPOSED and not is_weight:
            is_weight = True
        elif node.name() != _CAST:
            break
    else:
        return None
    if not is_linear(node):
        return None
    if not is_weight:
        return Linear(node, None) if place == 0 and leaf.variable.dim() == 1 else None
    if place != len(node.next_functions) - 1:
        return None
    x = kept_input(node)
    if x is None or type(x) not in (Tensor, FakeTensor) or x.device != leaf.variable.device:
        return None
    return Linear(node, x)


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
