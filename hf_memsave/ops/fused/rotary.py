r"""``fused_rotary``: the rotary embedding of queries and keys as one kernel each, in each direction.

Kept for backward, of queries and keys ``[batch, heads, length, D]``::

    stock    cosines and sines, once for all layers: 5 operations each forward, and 9 backward
    here     cosines and sines, once for all layers: 1 operation each forward, and 1 backward

A module's forward finds ``apply_rotary_pos_emb`` among the globals of its file. Here the same code runs with that one
global replaced: no file and no other module is touched.
Source: Su et al. (2021), arXiv:2104.09864.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_memsave.arch.fused import ROTARY_NAME as NAME
from hf_memsave.ops.fused.kernels import can_run, fused, kernels
from hf_memsave.ops.op import Op


class _Names(dict[str, Any]):
    """The globals of a file, ``home``, looked up when asked for, with ours in place of its rotary embedding."""

    def __init__(self, home: dict[str, Any]) -> None:
        super().__init__(__builtins__=home["__builtins__"], __name__=home["__name__"])
        is_its_own = home[NAME].__module__ == home["__name__"]  # else another tool has put its own there before
        self.home, self.stock = home, home[NAME] if is_its_own else object()
        self.ours = partial(apply, home[NAME])

    def __getitem__(self, name: str) -> Any:
        found = self.home[name]
        return self.ours if found is self.stock else found  # another tool may have put its own there since


@functools.cache
def _turning(forward: Any) -> Callable[..., Any]:
    """Return a forward, and what it wraps, with our rotary embedding; unchanged if no function (set since)."""
    if not isinstance(forward, types.FunctionType):
        return cast("Callable[..., Any]", forward)
    names = _Names(forward.__globals__) if NAME in forward.__globals__ else forward.__globals__
    wrapped = getattr(forward, "__wrapped__", None)
    cells = [
        types.CellType(_turning(wrapped)) if wrapped is not None and cell.cell_contents is wrapped else cell
        for cell in forward.__closure__ or ()
    ]
    closure = tuple(cells) if forward.__closure__ else None
    ours = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, closure)
    ours.__kwdefaults__ = forward.__kwdefaults__
    return ours


def _rotary(module: nn.Module, patch: Any, *args: Any, **kwargs: Any) -> Any:
    return _turning(patch.stock.forward)(module, *args, **kwargs)


def apply(stock: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run ``apply_rotary_pos_emb``, fused where kernels run and the shapes are attention's; elsewhere ``stock``."""
    dim = args[0] if len(args) == 1 else kwargs.get("unsqueeze_dim", 1)
    is_partial = "q_pass" in stock.__code__.co_varnames  # it copies what comes after R
    is_known = len(args) + len(kwargs) <= 1 and (args or not kwargs or "unsqueeze_dim" in kwargs)
    if not (is_known and dim in (1, 2) and _fit(q, k, cos, sin, 3 - dim, is_partial) and can_run(q, k, cos, sin)):
        return stock(q, k, cos, sin, *args, **kwargs)
    if dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    turned = [fused(_turned, partial(_back, x.dtype), x, cos, sin, kept=slice(1, 3)) for x in (q, k)]
    return tuple(turned if dim == 1 else [x.transpose(1, 2) for x in turned])


def _fit(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dim: int, is_partial: bool) -> bool:
    """Return whether the kernel computes what broadcasting would; ``dim`` is the dimension of the tokens."""
    if not (q.dim() == k.dim() == 4 and cos.dim() == 3 and cos.shape == sin.shape and cos.dtype == sin.dtype):
        return False
    batch, length, turned = cos.shape
    of_heads = q.shape[0] == k.shape[0] and q.shape[dim] == k.shape[dim] == length and q.shape[3] == k.shape[3]
    width = q.shape[3]
    is_turned = turned % 2 == 0 and (turned <= width if is_partial else turned == width)
    return of_heads and is_turned and batch in (1, q.shape[0]) and not (cos.requires_grad or sin.requires_grad)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return kernels().rotary_forward(x, cos, sin, torch.promote_types(x.dtype, cos.dtype))


def _back(dtype: torch.dtype, wanted: tuple[bool, ...], dy: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return (kernels().rotary_backward(dy, cos, sin, dtype),)


FUSED_ROTARY = Op("fused_rotary", _rotary, is_implied=True, replaces_stock=True)
