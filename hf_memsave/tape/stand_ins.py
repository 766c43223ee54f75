"""Handles that hold less than the tensor, where one operation reads less of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_memsave.tape.handles import Handle, Held, Lent, Node, Ticket
from hf_memsave.tape.tensors import View, is_flipped


class StandIn(Handle):
    """Something smaller than the tensor, which suffices for one operation; it gives way if the tensor is kept anyway.

    ``small`` is its handle and ``decode`` makes a tensor from it; None if the operation decodes by itself.
    """

    __slots__ = ("view", "version", "small", "nbytes", "decode", "via")

    def __init__(self, tensor: Tensor, small: Handle, nbytes: int, decode: Callable[[Tensor], Tensor] | None) -> None:
        self.view, self.version, self.decode, self.nbytes = View(tensor), tensor._version, decode, nbytes
        self.small: Handle | None = small
        self.via: Handle | None = None

    def give_way(self, node: Node) -> None:
        """Ask ``node``, which gives the tensor, instead; not one that gives it approximately."""
        if not node.is_lossy:
            self._become(Ticket(node, self.view))

    def is_flipped(self) -> bool:
        """Whether it stands for a conjugate or negative view."""
        return self.view.is_flipped

    def is_kept_as(self, tensor: Tensor, handle: Handle) -> None:
        """Share the bytes of ``tensor``, of the same storage, which ``handle`` now keeps."""
        view = self.view
        if type(handle) is Lent:
            if view.is_of(tensor):
                handle.uses += 1
                self._become(handle)
        elif view.version == tensor._version and view.dtype == tensor.dtype and not is_flipped(tensor):
            mine = tensor.detach().as_strided(view.shape, view.stride(), view.storage_offset())
            self._become(Held(mine))

    def _become(self, handle: Handle) -> None:
        self.via, self.small, self.decode = handle, None, None

    def get(self) -> Tensor:
        """The tensor, or what ``decode`` makes of what stands for it."""
        if self.via is not None:
            return self.via.get()
        small = self.small.get()  # type: ignore[union-attr]
        return small if self.decode is None else self.decode(small)


class Blank(Handle):
    """The geometry of a tensor whose values backward does not read."""

    __slots__ = ("shape", "stride", "dtype", "device")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.stride, self.dtype, self.device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device

    def get(self) -> Tensor:
        """NaNs, which show if they are ever read. They lie in the tensor's layout, by which kernels choose theirs."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).fill_(torch.nan)
