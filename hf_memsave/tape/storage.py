"""Storage: activations that have to be kept, kept in 8 or 4 bits an element (:mod:`~hf_memsave.tape.quantize`).

Precedence: what is promised keeps nothing. Of what has to be kept, a sampled linear keeps rows, a rectifier or few-bit
activation its bits. Whatever floating-point activation then still reaches the tape is coded, once per storage: a code
is a promise (to decode it), so it is shared, versioned and dropped like any other. Parameters, their casts, integers,
small tensors and the statistics of norms are kept as they are. A NaN or infinity makes NaNs of its block.

SDPA's backward computes exp(q·k) again, which 4 bits would bias by 10% and more: its q, k, v and output take 8 bits
under int4 too, and so do the log probabilities of the loss. Masks of SDPA are never coded: nothing but the minus
infinities would be left of a block.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_memsave.tape.promise import Promise, Ticket, attach, is_dense, is_plain
from hf_memsave.tape.quantize import FORMATS, Format, decode, encode

if TYPE_CHECKING:
    from hf_memsave.tape.hooks import Tape

_ACTIVATION, _WHOLE = "_memsave_activation", "_memsave_whole"
#: Elements of a storage below which a code is not worth its launches.
SMALLEST = 512
_LOG_SOFTMAX = "LogSoftmaxBackward0"
_CODED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_LIKE_ITS_INPUT = {f"{name}Backward0" for name in ("ToCopy", "T", "Transpose", "Permute", "View", "Alias")}


class Code(Promise):
    """The promise to decode a tensor."""

    __slots__ = ()


class Codec:
    """What a block of a model knows of its storage: the format, and which of its forwards this is.

    Args:
        kind: A key of :data:`FORMATS`.
        index: Tells the draws of a model's blocks apart.
    """

    def __init__(self, kind: str, index: int) -> None:
        self.kind, self.index, self.calls = kind, index, 0

    def encoder(self) -> Encoder:
        """For one forward. Its draws follow torch's seed, but leave the generators of the model alone."""
        self.calls += 1
        return Encoder(FORMATS[self.kind], hash((torch.initial_seed(), self.index, self.calls)) & (2**63 - 1))


class Encoder(TorchFunctionMode):
    """Chooses what of one forward is coded, and codes it. A function mode, to see SDPA called."""

    def __init__(self, form: Format, seed: int) -> None:
        super().__init__()
        self.form, self.seed, self.in_attention = form, seed, False
        self.token = object()
        self.generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        if mask is not None and is_plain(mask):
            self._leave(mask)
        before, self.in_attention = self.in_attention, True
        try:
            return func(*args, **kwargs)
        finally:
            self.in_attention = before

    def note(self, tensor: Tensor) -> None:
        """Called with what a promise is made from, before it is detached: tells activations from parameters."""
        if self._is_activation(tensor):
            as_activation(tensor)

    def ticket(self, tensor: Tensor, tape: Tape) -> Ticket | None:
        """A ticket for the code of ``tensor``; None to keep it as it is."""
        if not self._takes(tensor):
            self._leave(tensor)
            return None
        mine, numel = tensor.detach(), tensor.untyped_storage().nbytes() // tensor.itemsize
        is_whole = 2 * tensor.numel() >= numel
        if is_whole:
            flat = mine.as_strided((numel,), (1,), 0)
        else:  # a small part of what may not be kept otherwise
            mine = mine if is_dense(mine) else mine.contiguous()
            flat = mine.as_strided((mine.numel(),), (1,))
        is_of_softmax = self.in_attention or (tensor.grad_fn is not None and tensor.grad_fn.name() == _LOG_SOFTMAX)
        form = FORMATS["int8"] if is_of_softmax else self.form
        recompute = partial(decode, form=form, numel=flat.numel(), dtype=flat.dtype)
        code = Code(flat, recompute, encode(flat, form, self._generator(flat.device)), (None, None))
        if is_whole:
            tape.slots.append(weakref.ref(attach(code, flat, tape)))
        ticket = code.take(mine, tape.keep)
        if ticket is not None and not is_whole:
            ticket.offset = 0
        return ticket

    def _leave(self, tensor: Tensor) -> None:
        setattr(tensor.untyped_storage(), _WHOLE, (tensor._version, self.token))

    def _takes(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        numel = storage.nbytes() // tensor.itemsize
        is_statistic = numel == tensor.numel() and (tensor.dim() == 0 or tensor.shape[-1] == 1)
        if tensor.dtype not in _CODED or tensor.numel() == 0 or numel < SMALLEST or is_statistic:
            return False
        if getattr(storage, _WHOLE, None) == (tensor._version, self.token):
            return False  # somebody keeps it already
        return getattr(storage, _ACTIVATION, False) or self._is_activation(tensor)

    def _is_activation(self, tensor: Tensor) -> bool:
        node: Any = tensor.grad_fn
        base = tensor._base  # a leaf without a gradient: made inside an autograd Function
        if node is None or (base is not None and base.is_leaf and base.requires_grad):
            return False
        if node.name() == "NativeGroupNormBackward0" and tensor.dim() == 2:  # its mean and 1/std
            return False
        while node.name() in _LIKE_ITS_INPUT and node.next_functions[0][0] is not None:
            node = node.next_functions[0][0]
        return "AccumulateGrad" not in node.name()

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self.generators[device]


def as_activation(tensor: Tensor) -> Tensor:
    """``tensor`` itself, marked as an activation where it has no node of its own to tell."""
    if is_plain(tensor):
        setattr(tensor.untyped_storage(), _ACTIVATION, True)
    return tensor
