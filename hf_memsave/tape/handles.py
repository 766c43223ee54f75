"""Handles: what autograd holds in place of a tensor that it asked to keep; those that need nothing of a tape."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_memsave.errors import KeptTensorChangedError


class Handle:
    """Anything on the tape that can give a tensor back."""

    __slots__ = ("__weakref__",)

    def get(self) -> Tensor:
        """The tensor, of the size, strides and offset of the one that was kept."""
        raise NotImplementedError


class KeptTensor(Handle):
    """A tensor that is kept whatever the tape does, such as a parameter."""

    __slots__ = ("tensor", "at")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.at = tensor if tensor.is_leaf else tensor.detach(), tensor._version

    def get(self) -> Tensor:
        """The very tensor."""
        if self.tensor._version != self.at:
            raise written(self.tensor, self.at)
        return self.tensor


class Blank(Handle):
    """The geometry of a tensor whose values backward does not read."""

    __slots__ = ("shape", "stride", "dtype", "device")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.stride, self.dtype, self.device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device

    def get(self) -> Tensor:
        """NaNs, which show if they are ever read. They lie in the tensor's layout, by which kernels choose theirs."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).fill_(torch.nan)


def written(tensor: Tensor, version: int) -> KeptTensorChangedError:
    """What to raise of a tensor that was kept at ``version``."""
    return KeptTensorChangedError(
        f"a tensor needed for gradient computation has been modified by an inplace operation: {tensor.dtype} "
        f"{list(tensor.shape)} was kept at version {version} and is now at version {tensor._version}. "
        "Write to it after backward(), or use the out-of-place form of the operation."
    )
