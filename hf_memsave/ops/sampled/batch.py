"""The batch of one forward, as its sampled linears know it: which tokens are real, and their positions."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_memsave.device import has_numbers, tells_later


@dataclass
class Tokens:
    """The tokens of one sequence dimension: an encoder's, or a decoder's."""

    mask: Tensor  # boolean [batch, seq], True for real tokens
    share: float = 1.0  # the largest share of real ones in earlier forwards

    @cached_property
    def real(self) -> int:
        """Number of real tokens, for the size of a draw; where the host would wait, by earlier forwards' share."""
        if not has_numbers(self.mask) or tells_later(self.mask):
            return round(self.share * self.mask.numel())
        return int(self.mask.sum())

    def forget(self) -> None:
        """Drop what was computed from the mask; it is recomputed when asked for."""
        for name in ("lengths", "from_start", "from_end"):
            self.__dict__.pop(name, None)

    @cached_property
    def lengths(self) -> Tensor:
        """Real tokens of each sample, ``[batch]``."""
        return self.mask.sum(1, dtype=torch.int32)

    @cached_property
    def from_start(self) -> Tensor:
        """Positions among the real tokens, ``[batch, seq]``; a pad has the nearest real one's before it, or 0."""
        return (self.mask.cumsum(1, dtype=torch.int32) - 1).clamp_min(0)

    @cached_property
    def from_end(self) -> Tensor:
        """Positions counted from the last real token, ``[batch, seq]``."""
        return (self.lengths[:, None] - 1 - self.from_start).clamp_min(0)


@dataclass
class Batch:
    """One forward of the model."""

    step: int  # how many came before it in training
    own: Tokens | None = None  # of the stack that runs; None if no mask was given
    decoder: Tokens | None = None  # of a decoder inside that is given no mask of its own
    other: Tokens | None = None  # in a decoder, the encoder's
    other_storage: int | None = None  # the encoder's output's, by which cross-attention's k and v find their tokens
    samples: Tensor | None = None  # rows of the batch in the table of samples, int64 [batch]
    _made: dict[Any, Tokens] = field(default_factory=dict, init=False)

    def forget(self, outside: Batch | None) -> None:
        """Drop, as the forward ends, all but the masks until backward, of tokens that ``outside`` does not know."""
        known = [] if outside is None else [id(tokens) for tokens in outside._known()]
        for tokens in self._known():
            if id(tokens) not in known:
                tokens.forget()

    def _known(self) -> list[Tokens]:
        return [tokens for tokens in (self.own, self.decoder, self.other, *self._made.values()) if tokens is not None]

    def tokens(self, x: Tensor) -> Tokens | None:
        """Return the tokens whose activations are ``x`` ``[batch, seq, features]``; if none are known, all are real."""
        own, other, shape = self.own, self.other, x.shape[:2]
        # Some models (OPT) flatten batch and sequence for a while: [batch * seq, features].
        if x.dim() == 2 and own is not None and len(x) == own.mask.numel():
            return self._on(x.device, own)
        if x.dim() != 3:
            return None
        is_own = own is not None and own.mask.shape == shape
        if other is not None and other.mask.shape == shape:
            if x.untyped_storage()._cdata == self.other_storage or not is_own:
                return self._on(x.device, other)
        if own is not None and is_own:
            return self._on(x.device, own)
        if (key := (shape, x.device)) not in self._made:
            self._made[key] = made = Tokens(torch.ones(shape, dtype=torch.bool, device=x.device))
            made.real = shape.numel()
        return self._made[key]

    def _on(self, device: torch.device, tokens: Tokens) -> Tokens:
        """Return these tokens on ``device``, where ``device_map`` has placed a layer."""
        if tokens.mask.device == device:
            return tokens
        if (key := (id(tokens), device)) not in self._made:
            self._made[key] = made = Tokens(tokens.mask.to(device), tokens.share)
            made.real = tokens.real
        return self._made[key]


class Checkpointed:
    """The batches of calls that the user's own checkpoints may run again, held for as long as they may."""

    def __init__(self) -> None:
        self._batches: weakref.WeakKeyDictionary[Any, dict[int, Batch]] = weakref.WeakKeyDictionary()
        self._calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def count(self, run: Any) -> int:
        """Count a call in one run of a checkpoint; return how many came before it, 0 without a checkpoint."""
        if run is None:
            return 0
        self._calls[run] = calls = self._calls.get(run, 0) + 1
        return calls - 1

    def note(self, checkpoint: Any, batch: Batch, call: int = 0) -> None:
        """Note the batch of a call in a checkpoint, unless one is noted."""
        if checkpoint is not None:
            self._batches.setdefault(checkpoint, {}).setdefault(call, batch)

    def batch(self, checkpoint: Any, call: int = 0) -> Batch | None:
        """Return the batch of a call in a checkpoint, if it has been noted."""
        return None if checkpoint is None else self._batches.get(checkpoint, {}).get(call)
