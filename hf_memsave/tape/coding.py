"""What one operation of PyTorch keeps instead of the tensors that autograd asks for: their geometry, or a code.

Autograd keeps whole tensors where backward reads less of them: a frozen convolution's input for its shape, a pool's
indices for their place in a window. Under :func:`coded` stock's own operation runs, with its own backward, and only
what it keeps is replaced. So gradients, second derivatives and every option of the operation are stock's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hf_memsave.tape import hooks
from hf_memsave.tape.masks import Mask
from hf_memsave.tape.promise import Fetch, Keep, Ticket, is_plain

Code = Callable[[Tensor, Keep], Any]


class Blank:
    """The geometry of a tensor whose values backward does not read."""

    __slots__ = ("shape", "stride", "dtype", "device")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.stride, self.dtype, self.device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device

    def get(self, fetch: Fetch) -> Tensor:
        """NaNs, which show if they are ever read. They lie in the tensor's layout, by which kernels choose theirs."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).fill_(torch.nan)


class Coded:
    """A smaller tensor, which ``decode`` makes the one to be kept from (None: the op decodes by itself)."""

    __slots__ = ("held", "decode")

    def __init__(self, code: Tensor, decode: Callable[[Tensor], Tensor] | None, keep: Keep) -> None:
        self.held, self.decode = keep(code), decode

    def give_way(self, handle: Any) -> None:
        """Hold ``handle``, what a tape made of the tensor itself, instead of the code."""
        self.held, self.decode = handle, None

    def get(self, fetch: Fetch) -> Tensor:
        """The tensor."""
        held = self.held.get(fetch) if isinstance(self.held, Ticket) else fetch(self.held)
        return held if self.decode is None else self.decode(held)


class _Coding:
    """The hooks around one operation; its handles hold them, so they must not hold what ``code`` does."""

    def __init__(self, tape: hooks.Tape, code: Code) -> None:
        self.tape = tape
        self.code: Code | None = code

    def pack(self, tensor: Tensor) -> Any:
        handle = self.code(tensor, self.tape.keep) if self.code is not None and is_plain(tensor) else None
        if handle is None:
            return self.tape.pack(tensor)
        if hooks.tally is not None and self.tape.keep is hooks._keep:
            hooks.tally.promised.add(tensor.untyped_storage()._cdata)
        return handle

    def unpack(self, handle: Any) -> Tensor:
        is_ours = isinstance(handle, (Blank, Coded, Mask))
        return handle.get(self.tape.fetch) if is_ours else self.tape.unpack(handle)


@contextlib.contextmanager
def coded(code: Code) -> Iterator[None]:
    """Run one operation; for each tensor it wants to keep, ``code`` chooses what goes on the tape.

    Args:
        code: Called with the tensor, and a function that keeps a smaller one. Returns a :class:`Blank`, :class:`Coded`
            or :class:`~hf_memsave.tape.masks.Mask`, what the tape's own ``pack`` returned, or None to leave the tensor
            to the tape.

    Yields:
        Nothing. Without a tape ``code`` is never called.
    """
    tape = hooks.current()
    if tape is None:
        yield
        return
    coding = _Coding(tape, code)
    try:
        with saved_tensors_hooks(coding.pack, coding.unpack):
            yield
    finally:
        coding.code = None
