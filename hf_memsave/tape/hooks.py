"""The tape: a saved-tensor hook that hands out promises, and passes everything else to the hook active outside.

While a :class:`Tape` is the innermost hook, every tensor that autograd wants to keep for backward goes through
:meth:`Tape.pack`, whoever the consumer is: ``nn.Linear``, SDPA, a PEFT layer. A promised tensor goes on the tape as a
ticket; any other one to the hook outside (gradient checkpointing, CPU offload, the user's own), or, with none
outside, as itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from hf_memsave.errors import KeptTensorChangedError
from hf_memsave.tape.booleans import bits
from hf_memsave.tape.masks import note_kept
from hf_memsave.tape.promise import Promise, Slot, Ticket, attach, fills_storage, find, is_plain
from hf_memsave.tape.storage import Codec, Encoder

_KEPT_BY = "_memsave_kept_by"
#: Counts what tapes are asked to keep while a :class:`~hf_memsave.tape.step_meter.StepMeter` watches.
tally: Tally | None = None


class Tally:
    """Addresses of the storages that autograd asked tapes to keep, by how they answered.

    Attributes:
        promised: Those promised instead.
        kept: Those kept for an op of the model.
        sources: Those kept for a promise.
    """

    def __init__(self) -> None:
        self.promised: set[int] = set()
        self.kept: set[int] = set()
        self.sources: set[int] = set()


class Tape:
    """``with Tape(): block(x)`` keeps promises instead of promised tensors, and is the context they belong to.

    Does nothing where one of ours is already innermost, without gradients, and wherever saved-tensor hooks cannot
    work (see :func:`is_available`). Promises made under this tape are void once it ends, and invisible under another
    one: so none can cross from one checkpointed block into the next.

    Args:
        codec: Codes the activations that have to be kept; None keeps them as they are.
    """

    def __init__(self, codec: Codec | None = None) -> None:
        self.codec = codec
        self.encoder: Encoder | None = None
        self.hooks: saved_tensors_hooks | None = None
        self.slots: list[weakref.ref[Slot]] = []
        self.token = object()  # marks the storages that this tape was asked to keep
        self.keep: Callable[[Tensor], Any] = _keep
        self.fetch: Callable[[Any], Tensor] = _fetch

    def __enter__(self) -> Tape:
        if is_available():
            outer = _innermost_hooks()
            if _owner(outer) is None:
                if outer is not None:
                    self.keep, self.fetch = outer
                self.hooks = saved_tensors_hooks(self.pack, self.unpack)
                self.hooks.__enter__()
                if self.codec is not None:
                    self.encoder = self.codec.encoder()
                    self.encoder.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.hooks is None:
            return
        encoder, self.encoder, self.codec = self.encoder, None, None
        if encoder is not None:
            encoder.__exit__(*error)
        hooks, self.hooks = self.hooks, None
        hooks.__exit__(*error)
        for ref in self.slots:
            if (slot := ref()) is not None:  # somebody holds the tensor: do not hold what it was made from
                slot.promise = None
        self.slots.clear()

    def pack(self, tensor: Tensor) -> Any:
        """Called by autograd with each tensor to keep; returns what goes on the tape."""
        promise = find(tensor, self)
        ticket = promise.take(tensor, self._keep_source) if promise is not None else None
        if (counts := self._counts()) is not None:
            (counts.kept if ticket is None else counts.promised).add(tensor.untyped_storage()._cdata)
        return self._keep_marked(tensor) if ticket is None else ticket

    def unpack(self, handle: Any) -> Tensor:
        """Called by autograd in backward; returns a tensor equal to the one packed."""
        return handle.get(self.fetch) if isinstance(handle, Ticket) else self.fetch(handle)

    def cost(self, tensor: Tensor) -> int:
        """Bytes that keeping ``tensor`` would add to what this tape was asked to keep so far."""
        promise = find(tensor, self)
        sources = [tensor] if promise is None else promise.sources()
        return sum({s.untyped_storage()._cdata: self._own_cost(s) for s in sources}.values())

    def _own_cost(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        return 0 if getattr(storage, _KEPT_BY, None) is self.token else storage.nbytes()

    def _keep_marked(self, tensor: Tensor) -> Any:
        if is_plain(tensor):
            setattr(tensor.untyped_storage(), _KEPT_BY, self.token)
            if (ticket := bits(tensor, self)) is not None:
                return ticket
            if self.encoder is not None and (ticket := self.encoder.ticket(tensor, self)) is not None:
                return ticket
        return self.keep(tensor)

    def _keep_source(self, tensor: Tensor) -> Any:
        if (counts := self._counts()) is not None:
            counts.sources.add(tensor.untyped_storage()._cdata)
        return self._keep_marked(tensor)

    def _counts(self) -> Tally | None:
        return tally if self.keep is _keep else None  # what a hook outside makes of a tensor is not for us to count

    def promise(
        self,
        output: Tensor,
        recompute: Callable[..., Tensor],
        inputs: tuple[Tensor, ...],
        taken: Callable[..., None] | None = None,
    ) -> None:
        """Register ``recompute(*inputs)`` as a way to get ``output`` back, if that is sound.

        Args:
            output: As for :func:`promise`, and so the next two.
            recompute: Runs in backward.
            inputs: What it needs.
            taken: Called with the inputs if somebody takes the promise, and so keeps them: no sooner, and at most once.
        """
        if not is_plain(output) or not fills_storage(output) or not all(is_plain(i) for i in inputs):
            return
        mine = output.untyped_storage()._cdata
        if any(i.untyped_storage()._cdata == mine for i in inputs):
            return  # an identity, or written in place: recomputing would need what it replaces
        if self.encoder is not None:
            for given in inputs:
                self.encoder.note(given)
        sources = tuple(find(i, self) for i in inputs)
        slot = attach(Promise(output, recompute, inputs, sources, taken), output, self)
        self.slots.append(weakref.ref(slot))


def current() -> Tape | None:
    """The tape that is innermost on this thread; None under a foreign hook, and wherever ops must be stock."""
    if not is_available():
        return None
    return _owner(_innermost_hooks())


def promise(output: Tensor, recompute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Promise that ``recompute(*inputs)`` equals ``output`` bit for bit.

    Args:
        output: A fresh tensor. Without a tape, or where it shares its storage, nothing is registered.
        recompute: Runs in backward, without gradients, under the autocast state of now. Must hold no tensors itself.
        *inputs: The tensors that ``recompute`` needs, positionally.

    Returns:
        ``output`` itself.
    """
    if (tape := current()) is not None:
        tape.promise(output, recompute, inputs)
    return output


def promised(fn: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``fn(*inputs)``, and the promise to do it again."""
    return promise(fn(*inputs), fn, *inputs)


def is_available() -> bool:
    """Whether saved-tensor hooks do anything useful here.

    Returns:
        False without gradients; under ``torch.compile`` (its partitioner recomputes by itself) or tracing; in
        ``torch.func`` transforms and forward-mode AD, which refuse hooks; and where somebody disabled them.
    """
    return (
        not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and torch._C._autograd._saved_tensors_hooks_is_enabled()
    )


def _innermost_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The (pack, unpack) pair innermost on this thread: the one private door to the hooks active outside."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _owner(hooks: tuple[Callable[..., Any], Callable[..., Any]] | None) -> Tape | None:
    owner = getattr(hooks[0], "__self__", None) if hooks is not None else None
    return owner if isinstance(owner, Tape) else None


def _keep(tensor: Tensor) -> tuple[Tensor, int]:
    # Detached: an op that keeps its own output would otherwise own itself, through the output's grad_fn.
    handle = (tensor if tensor.grad_fn is None else tensor.detach()), tensor._version
    note_kept(tensor, handle, _fetch)
    return handle


def _fetch(handle: tuple[Tensor, int]) -> Tensor:
    """Autograd's own check, which Python hooks switch off."""
    tensor, version = handle
    if tensor._version != version:
        raise KeptTensorChangedError(
            f"a tensor needed for gradient computation has been modified by an inplace operation: {tensor.dtype} "
            f"{list(tensor.shape)} was kept at version {version} and is now at version {tensor._version}. Write to it "
            "after backward(), or use the out-of-place form of the operation."
        )
    return tensor
