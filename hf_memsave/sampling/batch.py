"""What the sampled linears of one forward know of its batch: which tokens are real, and where they stand."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_memsave.device import has_numbers, tells_later


@dataclass
class Tokens:
    """The tokens of one sequence dimension: an encoder's, or a decoder's.

    Attributes:
        mask: Boolean ``[batch, seq]``, True for real tokens.
        share: How many of them were real in earlier forwards, at the most.
    """

    mask: Tensor
    share: float = 1.0

    @cached_property
    def real(self) -> int:
        """How many are real; by the share of earlier forwards, where the host would wait for their number.

        The size of a draw follows from it, and any size is unbiased.
        """
        if not has_numbers(self.mask) or tells_later(self.mask):
            return round(self.share * self.mask.numel())
        return int(self.mask.sum())

    def forget(self) -> None:
        """What follows from the mask is worked out again when it is asked for."""
        for name in ("lengths", "from_start", "from_end"):
            self.__dict__.pop(name, None)

    @cached_property
    def lengths(self) -> Tensor:
        """Real tokens of each sample, ``[batch]``."""
        return self.mask.sum(1, dtype=torch.int32)

    @cached_property
    def from_start(self) -> Tensor:
        """Position among the real tokens, ``[batch, seq]``; for a pad, that of the nearest real one before it, or 0."""
        return (self.mask.cumsum(1, dtype=torch.int32) - 1).clamp_min(0)

    @cached_property
    def from_end(self) -> Tensor:
        """Positions, counted from the last real token."""
        return (self.lengths[:, None] - 1 - self.from_start).clamp_min(0)


@dataclass
class Batch:
    """One forward of the model.

    Attributes:
        step: How many came before it in training.
        own: Tokens of the stack that runs; None if no mask was given.
        decoder: Tokens that a decoder inside will call its own, where it is given no mask.
        other: In a decoder, the encoder's tokens.
        other_storage: Address of the encoder's output, by which cross-attention's k and v know whose tokens they see.
        samples: Rows of the batch in the table of samples, int64 ``[batch]``.
    """

    step: int
    own: Tokens | None = None
    decoder: Tokens | None = None
    other: Tokens | None = None
    other_storage: int | None = None
    samples: Tensor | None = None

    def forget(self, outside: Batch | None) -> None:
        """Where it ends: of tokens that ``outside`` does not know, nothing but the masks is kept until backward."""
        known = [] if outside is None else [id(tokens) for tokens in outside._known()]
        for tokens in self._known():
            if id(tokens) not in known:
                tokens.forget()

    def _known(self) -> list[Tokens]:
        own = (self.own, self.decoder, self.other, *self.__dict__.get("_all", {}).values())
        return [tokens for tokens in own if tokens is not None]

    def tokens(self, x: Tensor) -> Tokens | None:
        """The tokens whose activations are ``x``, ``[batch, seq, features]``; of its own mask if no other is known."""
        # Some models (OPT) flatten batch and sequence for a while: [batch * seq, features].
        if x.dim() == 2 and self.own is not None and len(x) == self.own.mask.numel():
            return self._on(x.device, self.own)
        if x.dim() != 3:
            return None
        shape = x.shape[:2]
        if self.other is not None and self.other.mask.shape == shape:
            is_own = self.own is not None and self.own.mask.shape == shape
            if x.untyped_storage()._cdata == self.other_storage or not is_own:
                return self._on(x.device, self.other)
        if self.own is not None and self.own.mask.shape == shape:
            return self._on(x.device, self.own)
        return self._unmasked(shape, x.device)

    def _on(self, device: torch.device, tokens: Tokens) -> Tokens:
        """These tokens where a layer is, as ``device_map`` has placed it."""
        if tokens.mask.device == device:
            return tokens
        found: dict[Any, Tokens] = self.__dict__.setdefault("_all", {})
        if (id(tokens), device) not in found:
            found[id(tokens), device] = copy = Tokens(tokens.mask.to(device), tokens.share)
            copy.__dict__["real"] = tokens.real
        return found[id(tokens), device]

    def _unmasked(self, shape: torch.Size, device: torch.device) -> Tokens:
        found: dict[Any, Tokens] = self.__dict__.setdefault("_all", {})
        if (shape, device) not in found:
            found[shape, device] = tokens = Tokens(torch.ones(shape, dtype=torch.bool, device=device))
            tokens.__dict__["real"] = shape.numel()
        return found[shape, device]


class Checkpointed:
    """The batches of calls that a checkpoint of the user's own may run again, for as long as it may."""

    def __init__(self) -> None:
        self._batches: weakref.WeakKeyDictionary[Any, dict[int, Batch]] = weakref.WeakKeyDictionary()
        self._calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def count(self, run: Any) -> int:
        """How many calls came before in one run of a checkpoint; 0 without one."""
        if run is None:
            return 0
        self._calls[run] = calls = self._calls.get(run, 0) + 1
        return calls - 1

    def note(self, checkpoint: Any, batch: Batch, call: int = 0) -> None:
        """The batch of a call in a checkpoint; the first one stays."""
        if checkpoint is not None:
            self._batches.setdefault(checkpoint, {}).setdefault(call, batch)

    def batch(self, checkpoint: Any, call: int = 0) -> Batch | None:
        """The batch of a call, if it has been noted."""
        return None if checkpoint is None else self._batches.get(checkpoint, {}).get(call)
