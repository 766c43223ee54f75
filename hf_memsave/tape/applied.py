"""Autograd Functions of kernel libraries, installed or from the Hub, as functions that a tape knows.

Each reads its tensors, costs about a memory pass, and gives the same bits again. PyTorch calls no function mode for
``Function.apply``: from the first ``patch`` on these ask for one, as PyTorch's own functions do. Any other Function
keeps what it keeps; what its kernels may write to is known by the addresses that they ask for (functions.py).
Source: Hsu et al. (2024), arXiv:2410.10989.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch.overrides import handle_torch_function, has_torch_function

#: Name of a Function -> the kind by which a configuration leaves it to stock.
_KINDS = {
    **dict.fromkeys(("LigerRMSNormFunction", "LigerLayerNormFunction", "_RMSNorm"), "norm"),
    **dict.fromkeys(("LigerSiLUMulFunction", "LigerGELUMulFunction", "_Gated", "_Activation"), "activation"),
}
#: What a tape sees when one of them is applied -> its kind.
APPLIED: dict[Any, str] = {}


def is_of_kernels(file: str) -> bool:
    """Return whether a Python module of this name is of one of these libraries, or of a copy from the Hub."""
    return "liger_kernel" in file or "memsave_kernels" in file


def find() -> None:
    """Have tapes see the Functions of all copies of these libraries that are loaded; ``patch`` calls it."""
    for module in [module for name, module in sys.modules.items() if is_of_kernels(name)]:
        for name, kind in _KINDS.items():
            cls = vars(module).get(name)
            if cls is not None and "apply" not in vars(cls):
                cls.apply = staticmethod(apply := _overridable(cls.apply))
                APPLIED[apply] = kind


def _overridable(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def apply(*args: Any, **kwargs: Any) -> Any:
        if has_torch_function(args):
            return handle_torch_function(apply, args, *args, **kwargs)
        return stock(*args, **kwargs)

    return apply
