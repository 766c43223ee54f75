"""Adds to the exact op of an activation or norm those whose gradients are not exact, chosen by the same setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from hf_memsave.ops.cast import is_autocast
from hf_memsave.ops.few_bit import FewBit, few_bit_forward
from hf_memsave.ops.inverted import inverted_forward
from hf_memsave.ops.op import Binding, Op
from hf_memsave.ops.output_norm import HALVES, Normed, in_need, output_norm
from hf_memsave.ops.precision_bit import precision_bit_forward

_FORWARDS = {"invert": inverted_forward, "precision_bit": precision_bit_forward}
#: One column in this many may keep its input.
_SHARE = 8


def approximable(op: Op) -> Op:
    """``op``, or what the binding's value asks for instead: "invert", "precision_bit" or a :class:`FewBit`."""

    def forward(module: nn.Module, binding: Binding, input: Tensor) -> Tensor:
        value = binding.value
        approximate = few_bit_forward if isinstance(value, FewBit) else _FORWARDS.get(value)
        chosen = op.forward if approximate is None or not input.requires_grad else approximate
        return chosen(module, binding, input)

    return dataclasses.replace(op, forward=forward)


def from_output(op: Op, normed: Callable[..., Normed]) -> Op:
    """``op``, or for the value "output" the same norm, which ``normed`` computes, from its output.

    Still ``op`` where over an eighth of the columns would keep their input, where x and γ differ in dtype (the gradient
    of the wider one would get the rounding of y), and where autocast would keep a wider y than x.

    Returns:
        An op of the same name, which refuses a norm without a weight.
    """

    def forward(module: nn.Module, binding: Binding, input: Tensor) -> Tensor:
        weight, bias, eps = _parameters(module, binding.names)
        if binding.value != "output" or weight is None or not _is_suited(input, weight, bias):
            return op.forward(module, binding, input)
        columns = in_need(weight, bias)
        if _is_too_many(columns, weight):
            return op.forward(module, binding, input)
        return output_norm(partial(normed, eps=eps), input, weight, bias, columns if len(columns) else None)

    return dataclasses.replace(op, forward=forward, note=_note, refuse=_refuse_no_weight)


def _is_suited(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    is_wanted = any(t is not None and t.requires_grad for t in (x, weight, bias))
    return is_wanted and x.dtype == weight.dtype and not (is_autocast(x) and x.dtype in HALVES)


def _note(module: nn.Module, binding: Binding) -> str:
    weight, bias, _ = _parameters(module, binding.names)
    if binding.value != "output" or weight is None or weight.is_meta:
        return ""
    columns = in_need(weight, bias)
    if not len(columns):
        return ""
    share = f"{len(columns)} of {weight.numel()} columns"
    if _is_too_many(columns, weight):
        return f"recomputed from its input: {share} have |β| > |γ| or γ near 0, over one in {_SHARE}"
    return f"keeps the input of {share}: |β| > |γ| or γ near 0"


def _refuse_no_weight(module: nn.Module, binding: Binding) -> str | None:
    if binding.value != "output" or _parameters(module, binding.names)[0] is not None:
        return None
    return (
        "has no weight (γ), but norm='output' expects one: the backward of its output divides by it. Use "
        "norm='recompute', or norm='stock'."
    )


def _parameters(module: nn.Module, names: Mapping[str, str]) -> tuple[Tensor | None, Tensor | None, Any]:
    weight, bias, eps = (getattr(module, names.get(role, role), None) for role in ("weight", "bias", "eps"))
    return weight, bias, eps


def _is_too_many(columns: Tensor, weight: Tensor) -> bool:
    return len(columns) * _SHARE > weight.numel()
