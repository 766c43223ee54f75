"""Autograd Functions of kernel libraries, installed or from the Hub, as functions that a tape knows.

In forward each reads its tensors, costs about a memory pass, and gives the same bits again. PyTorch calls no function
mode for ``Function.apply``: from the first ``patch`` on these ask for one, as PyTorch's own functions do. Any other
Function keeps what it keeps; what its kernels may write to is known by the addresses that they ask for (functions.py).
Source: Hsu et al. (2024), arXiv:2410.10989.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from hf_memsave.tape.content import alive
from hf_memsave.tape.handles import Handle
from hf_memsave.tape.private import count_modes
from hf_memsave.tape.tape import Handler, Tape, new
from hf_memsave.tape.tensors import is_plain


class Lent(Handle):
    """A tensor that its Function's backward writes over: if others are made from it still, it gets a copy."""

    __slots__ = ("handle",)

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    def get(self) -> Tensor:
        """Return the tensor, or a copy; of one that was computed again, others are told of the write."""
        content, x = getattr(self.handle, "content", self.handle), self.handle.get()
        if any(alive(getattr(content, "readers", ()))):
            return x.clone()
        if not getattr(content, "is_kept", True):
            torch.autograd.graph.increment_version(x)
        return x


def lends(tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a Function whose backward writes gradients over the tensors that it keeps."""

    def lend(tensor: Tensor) -> Handle:
        with tape.using(coder=None):
            return Lent(tape.pack(tensor))

    with tape.using(coder=lend):
        return new(tape, func, args, kwargs)


#: Name of a Function -> the kind by which a configuration leaves it to stock, and its handler.
_KNOWN: dict[str, tuple[str, Handler]] = {
    **dict.fromkeys(("LigerRMSNormFunction", "LigerLayerNormFunction", "_RMSNorm"), ("norm", new)),
    **dict.fromkeys(("LigerSiLUMulFunction", "LigerGELUMulFunction"), ("activation", lends)),
    **dict.fromkeys(("_Gated", "_Activation"), ("activation", new)),
}
#: What a tape sees when one of them is applied -> the same.
APPLIED: dict[Any, tuple[str, Handler]] = {}


def is_of_kernels(file: str) -> bool:
    """Return whether a Python module of this name is of one of these libraries, or of a copy from the Hub."""
    return "liger_kernel" in file or "memsave_kernels" in file


def find() -> None:
    """Have tapes see the Functions of all copies of these libraries that are loaded; ``patch`` calls it."""
    for module in [module for name, module in list(sys.modules.items()) if is_of_kernels(name)]:
        for name, known in _KNOWN.items():
            cls = getattr(module, "__dict__", {}).get(name)  # None of a module that may not be imported
            if cls is not None and "apply" not in vars(cls):
                _make_overridable(cls)
                APPLIED[cls.apply] = known


def _make_overridable(cls: Any) -> None:
    stock = cls.apply

    def apply(of: Any, *args: Any, **kwargs: Any) -> Any:
        if of is not cls:  # a subclass, of which nothing is known
            return super(cls, of).apply(*args, **kwargs)
        if count_modes() and all(is_plain(a) for a in args if isinstance(a, Tensor)):
            return handle_torch_function(cls.apply, args, *args, **kwargs)
        return stock(*args, **kwargs)

    cls.apply = classmethod(apply)
