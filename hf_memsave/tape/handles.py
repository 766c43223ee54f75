"""Handles, which autograd holds in place of tensors that it asked to keep; here, the ones that need no tape."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_memsave.errors import KeptTensorChangedError


class Handle:
    """An object on the tape that can give a tensor back in backward."""

    __slots__ = ("__weakref__",)

    def get(self) -> Tensor:
        """Return the tensor, of the size, strides and offset of the one that autograd asked to keep."""
        raise NotImplementedError


class KeptTensor(Handle):
    """A tensor that is kept whatever the tape does, such as a parameter."""

    __slots__ = ("tensor", "at")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.at = tensor if tensor.is_leaf else tensor.detach(), tensor._version

    def get(self) -> Tensor:
        """Return the very tensor."""
        if self.tensor._version != self.at:
            raise written(self.tensor, self.at)
        return self.tensor


class Blank(Handle):
    """The geometry of a tensor whose values backward does not read."""

    __slots__ = ("shape", "stride", "dtype", "device")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.stride, self.dtype, self.device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device

    def get(self) -> Tensor:
        """Return NaNs, which show if they are ever read, in the tensor's layout, by which kernels choose theirs."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).fill_(torch.nan)


def written(tensor: Tensor, version: int) -> KeptTensorChangedError:
    """Return the error to raise for a tensor that was kept at ``version`` and written to since."""
    return KeptTensorChangedError(
        f"a tensor needed for gradient computation has been modified by an inplace operation: {tensor.dtype} "
        f"{list(tensor.shape)} was kept at version {version} and is now at version {tensor._version}. "
        "Write to it after backward(), or use the out-of-place form of the operation."
    )
