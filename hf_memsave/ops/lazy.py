"""A tensor that is not computed yet: told by shape, dtype and device, and computed when it is first read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_memsave.tape.private import tree_map

#: What a tensor is, told without its bytes.
TOLD = {
    getattr(Tensor, name).__get__
    for name in "shape dtype device ndim layout requires_grad grad_fn is_leaf is_cuda is_cpu is_meta is_sparse "
    "is_quantized itemsize nbytes retains_grad output_nr _version".split()
} | {
    getattr(Tensor, name)
    for name in "size dim numel nelement is_floating_point is_complex element_size get_device is_sparse "
    "__len__ ndimension is_signed".split()
    if callable(getattr(Tensor, name))
}


class Lazy(Tensor):
    """See the module."""

    def computed(self) -> Tensor:
        """The tensor itself."""
        raise NotImplementedError

    @classmethod
    def empty(cls, like: Tensor, device: torch.device | None = None) -> Any:
        """One without bytes."""
        make: Any = Tensor._make_wrapper_subclass
        return make(cls, like.shape, dtype=like.dtype, device=device or like.device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # which autograd does to what a function returns
            return cls.empty(args[0])
        args, kwargs = tree_map(computed, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.computed())


def computed(argument: Any) -> Any:
    """The argument, and what is lazy computed."""
    return argument.computed() if isinstance(argument, Lazy) else argument
