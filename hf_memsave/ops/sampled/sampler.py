"""The sampler of one model: which batch runs, and which rows each of its sampled products draws.

Rows are drawn from a seed of (seed, process, layer, step), never from the model's generators: a block that is run again
by gradient checkpointing draws the same, and dropout masks are those of a run without sampling.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from hf_memsave.config.wtacrs import WTACRS
from hf_memsave.device import Questions, has_numbers, new_generator, tells_later
from hf_memsave.errors import ConfigError
from hf_memsave.logs import logger
from hf_memsave.ops.sampled.batch import Batch, Checkpointed, Tokens
from hf_memsave.ops.sampled.estimators import EAGER, Draw, Drawing
from hf_memsave.ops.sampled.norm_cache import NONZERO, NormCache

#: The batch's column of sample indices.
INDEX = "sample_idx"
_SLOTS = 2**18
_IGNORED = -100
#: Factors of the hash of tokens and positions that numbers a sample: odd, and of many bits.
_MIX = 0x1B873593CC9E2D51, 0x2545F4914F6CDD1D
#: Stacks whose share of real tokens is known.
_STACKS = "own", "decoder"
#: The key of these shares in a state.
_SHARES = "shares"
#: Forwards among which the largest share counts: calls of several kinds (queries, documents) may take turns.
_EARLIER = 8
#: Above this share, drawn rows and what comes with them (a ReLU's bits, their indices) take more than all rows.
MOST = 15 / 16


class Layer(NamedTuple):
    """The name of a sampled module, and the sampler of its model."""

    name: str
    sampler: Sampler


class Sampler:
    """The state that all sampled layers of a model share."""

    def __init__(self, config: WTACRS) -> None:
        samples = {"sample_idx": config.samples, "content": config.samples or _SLOTS}.get(str(config.cache), 0)
        self.config, self.step = config, 0  # training forwards so far
        self.cache = NormCache(config.cache, samples or 0)
        # Each stack's shares of real tokens in the last forwards whose masks have been read.
        self.shares: dict[str, deque[float]] = {stack: deque(maxlen=_EARLIER) for stack in _STACKS}
        self._told: set[str] = set()
        self._questions, self._local, self._checkpointed = Questions(), threading.local(), Checkpointed()

    def __getstate__(self) -> dict[str, Any]:
        self._questions.hear()
        self.cache.learn()
        return {**self.__dict__, "_questions": None, "_local": None, "_checkpointed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _questions=Questions(), _local=threading.local(), _checkpointed=Checkpointed())

    @property
    def batch(self) -> Batch | None:
        """The batch that runs on this thread."""
        return getattr(self._local, "batch", None)

    @contextlib.contextmanager
    def entering(
        self, arguments: Mapping[str, Any], given: Batch | None, checkpoint: Any = (None, None), function: Any = None
    ) -> Iterator[None]:
        """Set this thread's batch while a model or block runs: a new one, or the part of one that the block sees.

        Where it is run again in backward, its forward's batch is ``given``. It may run in the user's own ``checkpoint``
        (a frame, and a run of it), or in the backward of a ``function`` of autograd, such as a reentrant checkpoint.
        """
        outside, (frame, run) = self.batch, checkpoint
        call = self._checkpointed.count(run)
        around = outside or given or self._checkpointed.batch(frame, call) or self._checkpointed.batch(function)
        batch = self._begin(arguments) if around is None else _within(around, arguments)
        self._checkpointed.note(frame, around or batch, call)
        self._local.batch = batch
        try:
            yield
        finally:
            self._local.batch = outside
            batch.forget(outside)

    def remember(self, functions: Iterable[Any], function: Any) -> None:
        """Note the batch for ``functions``, in whose forwards a block runs without gradients, for their backwards."""
        if (batch := self.batch or self._checkpointed.batch(function)) is not None:
            for context in functions:
                self._checkpointed.note(context, batch)

    def draw(self, layer: str, x: Tensor, tokens: Tokens | None, batch: Batch, drawing: Drawing = EAGER) -> Draw | None:
        """Draw rows of ``x`` ``[*, features]``, counted over all leading dimensions; None where all are taken."""
        real = x.shape[:-1].numel() if tokens is None else tokens.real
        k = max(round(self.config.budget * real), self.config.minimum)
        if k > MOST * real:
            return None
        norms = drawing.row_norms(x.detach()).flatten()
        learned = self.cache.predict(layer, batch, tokens), self.cache.allowed(layer, tokens)
        p = drawing.probabilities(norms, *(None if t is None else t.flatten() for t in learned))
        return self.choose(p, k, layer, batch, drawing)

    def choose(self, p: Tensor, k: int, layer: str, batch: Batch, drawing: Drawing = EAGER) -> Draw:
        """Draw k of the pairs with probabilities p ``[*, m]``."""
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        text = f"{self.config.seed}/{torch.distributed.get_rank() if is_distributed else 0}/{layer}/{batch.step}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
        generator = new_generator(p.device, seed)
        u = torch.rand((*p.shape[:-1], k), generator=generator, dtype=p.dtype, device=p.device)
        return drawing.draw(self.config.estimator, p, k, u)

    def _begin(self, arguments: Mapping[str, Any]) -> Batch:
        self._questions.hear()
        self._ask_for_pads()
        mask, of_decoder, labels = map(arguments.get, ("attention_mask", "decoder_attention_mask", "labels"))
        if not _is_2d(of_decoder) and _is_2d(labels):
            of_decoder = labels != _IGNORED
        own, decoder = (self._counted(*stack) for stack in zip(self.shares.values(), (mask, of_decoder), strict=True))
        batch = Batch(self.step, own, decoder, samples=self._samples(arguments))
        self.step += 1
        return batch

    def _counted(self, shares: deque[float], mask: Any) -> Tokens | None:
        """Make the tokens of a stack, and ask for their share of real ones, for later forwards."""
        if not _is_2d(mask):
            return None
        tokens = Tokens(mask != 0, max(shares, default=1.0))
        if has_numbers(tokens.mask) and tells_later(tokens.mask) and tokens.mask.numel():
            share = tokens.mask.sum() / tokens.mask.numel()
            self._questions.ask(share, lambda share: shares.append(float(share)))
        return tokens

    def _samples(self, arguments: Mapping[str, Any]) -> Tensor | None:
        """Return the batch's rows in the table of samples; None without one."""
        if self.config.cache == INDEX:
            index = arguments.get(INDEX)
            if not isinstance(index, Tensor) or index.dim() != 1 or index.is_floating_point():
                raise ConfigError(
                    f"WTACRS(cache='sample_idx') expected the batch's column {INDEX!r}, a whole number a sample, got "
                    f"{_kind(index)}. Add it: dataset.add_column({INDEX!r}, range(len(dataset))), or use "
                    "cache='content'."
                )
            rows = index.detach().long()
            if len(rows) and has_numbers(rows):
                self._questions.ask(torch.stack(rows.aminmax()), self._check)
            return rows.remainder(self.cache.samples)  # for the step in which a wrong one is not known yet
        if self.config.cache != "content":
            return None
        ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
        if not _is_2d(ids) or ids.is_floating_point():
            raise ConfigError(
                f"WTACRS(cache='content') expected input_ids [batch, seq] to tell samples apart by, got {_kind(ids)}. "
                "Use cache='position', or cache='sample_idx' with a column of indices."
            )
        mask = mask != 0 if _is_2d(mask) and mask.shape == ids.shape else torch.ones_like(ids) > 0
        # By the position among the real tokens: the same wherever the pads are.
        position = (Tokens(mask).from_start.long() + 1) * _MIX[0]
        odd = (position ^ (position >> 29)) * _MIX[1] | 1
        return (((ids.long() + 1) * mask * odd).sum(1) >> 20).remainder(self.cache.samples)

    def _check(self, bounds: Tensor) -> None:
        first, last = bounds.tolist()
        if not 0 <= first <= last < self.cache.samples:
            raise ConfigError(
                f"{INDEX}: expected numbers from 0 to {self.cache.samples - 1}, got {first} to {last}. "
                "Set WTACRS(samples=...) to the number of training samples."
            )

    def _ask_for_pads(self) -> None:
        """Ask which layers' pads have a gradient after all, to report them."""
        if self.step < 1 or self.step & (self.step - 1) and self.step % 64:  # a transfer to the host: not every step
            return
        for names, pads in self.cache.pads():
            self._questions.ask(pads, partial(self._tell, names))

    def _tell(self, names: list[str], pads: Tensor) -> None:
        """Report layers whose pads have a gradient, once."""
        states = zip(names, pads.tolist(), strict=True)
        if new := [name for name, state in states if state == NONZERO and name not in self._told]:
            self._told.update(new)
            logger.warning(
                "The output gradient of %d sampled linears (%s, ...) is not zero at padded tokens, as with left "
                "padding or mean pooling: padded rows are drawn like all others there.", len(new), new[0],
            )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to draw as this one would, as tensors on the CPU."""
        self._questions.hear()
        known = [[-1.0] * (_EARLIER - len(shares)) + [*shares] for shares in self.shares.values()]
        shares = torch.tensor(known, dtype=torch.float64)
        return {"step": torch.tensor(self.step), _SHARES: shares, **self.cache.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue where another run's :meth:`state_dict` was taken."""
        self.step = int(state["step"])
        self._questions = Questions()
        for stack, shares in zip(_STACKS, state[_SHARES].tolist(), strict=True):
            self.shares[stack] = deque((share for share in shares if share >= 0), maxlen=_EARLIER)
        self.cache.load_state_dict({k: v for k, v in state.items() if k not in ("step", _SHARES)}, device)


def _within(outside: Batch, arguments: Mapping[str, Any]) -> Batch:
    """Return the batch as a block inside the model sees it: a decoder stack has its own tokens and the encoder's."""
    hidden, mask = arguments.get("encoder_hidden_states"), arguments.get("attention_mask")
    if isinstance(hidden, Tensor):  # gradient checkpointing may hand the block a copy of the encoder's output
        batch = replace(outside, other_storage=hidden.untyped_storage()._cdata)
        if outside.other is None:
            batch.other = _tokens(arguments.get("encoder_attention_mask"), outside.own) or outside.own
            batch.own = _tokens(mask, outside.decoder) or outside.decoder
        return batch
    if outside.other is None and _is_2d(mask) and (outside.own is None or outside.own.mask.shape != mask.shape):
        return replace(outside, own=_tokens(mask, outside.own))
    return outside


def _tokens(mask: Any, like: Tokens | None) -> Tokens | None:
    return Tokens(mask != 0, 1.0 if like is None else like.share) if _is_2d(mask) else None


def _is_2d(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() == 2


def _kind(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
