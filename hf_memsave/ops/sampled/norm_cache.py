r"""The norms of output gradients of earlier steps, by which rows are drawn before backward knows the real ones.

For token t of sample b, a layer's predicted norm is ``s_b √(P_t + Q_e)``:

- P: a running mean of the squared norms at position t, and Q: at position e from the end, each relative to the batch's
  mean (to the sample's, where s is known). P knows a classifier's first token, Q a causal model's last.
- s: the sample's own norm when it was last seen, in steps of 1/8 octave: one byte a sample and layer.

All tensors are on the device of the gradients, and the host never reads them: it would wait for the last step.
The norms of a backward are learned at its end, for all layers at once: few launches instead of many.

A wrong prediction costs variance and never makes a bias. Once a layer's pads had no gradient, they are not drawn any
more; each backward looks again, and draws them again if one has.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_memsave.device import has_numbers
from hf_memsave.ops.sampled.batch import Batch, Tokens

#: Weight of the newest step in a running mean.
RATE = 0.1
#: States of a layer's pads: whether they had a gradient.
UNSEEN, ZERO, NONZERO = 0, 1, 2
_STEPS, _MIDDLE = 8, 128
_LOCK = threading.RLock()  # forwards on several threads share what was learned


class LayerNorms:
    """One layer's profiles, on the device of its gradients."""

    def __init__(self, device: torch.device) -> None:
        self.start = torch.empty(0, device=device)  # P, fp32 [longest sequence]; -1 where nothing was seen
        self.end = torch.empty(0, device=device)  # Q, fp32 [longest sequence]; -1 where nothing was seen
        self.reference = torch.zeros((), device=device)  # the first batch's mean squared norm; divides samples'
        self.pads = torch.zeros((), dtype=torch.int8, device=device)
        self.samples = torch.empty(0, dtype=torch.uint8, device=device)  # 0: not seen; empty until one is

    def fit(self, device: torch.device, length: int) -> None:
        """Move to the device of a model that has moved, and make room for sequences of ``length`` tokens."""
        if self.start.device != device:
            self.__dict__.update({name: value.to(device) for name, value in vars(self).items()})
        for name, profile in (("start", self.start), ("end", self.end)):
            if (missing := length - len(profile)) > 0:
                setattr(self, name, torch.cat([profile, profile.new_full((missing,), -1.0)]))


class _Told(NamedTuple):
    """One call of :meth:`NormCache.update`; calls of the same key can be learned at once."""

    key: Any
    layer: str
    samples: Tensor | None
    tokens: Tokens
    squared: Tensor


class NormCache:
    """The norms of every sampled layer of a model."""

    def __init__(self, kind: str | None, samples: int) -> None:
        self.kind, self.samples = kind, samples  # WTACRS.cache; how many the table has room for, or 0
        self.known: set[str] = set()  # names of the layers that use this cache
        self.backward = -1  # id of the last backward that was asked to call learn() at its end
        self._layers: dict[str, LayerNorms] = {}
        self._told: deque[_Told] = deque()

    @property
    def layers(self) -> dict[str, LayerNorms]:
        """The learned norms, by layer."""
        self.learn()
        return self._layers

    @property
    def nbytes(self) -> int:
        """Bytes that the tables of samples take at most: layers that share a draw share a table."""
        return self.samples * len(self.known)

    def predict(self, layer: str, batch: Batch, tokens: Tokens | None) -> Tensor | None:
        """Return expected gradient norms ``[batch, seq]``, to any scale; None if nothing is known."""
        norms = self.layers.get(layer)
        if self.kind is None or norms is None or tokens is None:
            return None
        with _LOCK:
            norms.fit(tokens.mask.device, tokens.mask.shape[1])
            start, end = norms.start.abs(), norms.end.abs()  # what was not seen counts as the mean, 1
        start, end = start.index_select(0, tokens.from_start.flatten()), end.index_select(0, tokens.from_end.flatten())
        predicted = (start + end).sqrt().view(tokens.mask.shape)
        samples = self._places(layer, batch.samples, tokens)
        if samples is None or not len(norms.samples):
            return predicted
        codes = norms.samples[samples]
        known = codes > 0
        factor = torch.exp2((codes.float() - _MIDDLE) / _STEPS) * known
        mean = factor.sum() / known.sum()  # for a sample that was never seen
        return predicted * factor.where(known, mean.where(known.any(), 1.0))[:, None]

    def allowed(self, layer: str, tokens: Tokens | None) -> Tensor | None:
        """Return which rows may be drawn, ``[batch, seq]``: pads only until a backward found their gradients zero."""
        norms = self.layers.get(layer)
        return None if norms is None or tokens is None else tokens.mask | (norms.pads != ZERO)

    def update(self, layer: str, batch: Batch, tokens: Tokens, squared: Tensor) -> None:
        """Note squared norms of an output's gradient, fp32 ``[batch, seq]``, to learn; ones not finite are ignored."""
        key = squared.shape, squared.device, id(tokens), id(batch.samples)
        self._told.append(_Told(key, layer, batch.samples, tokens, squared))

    def learn(self) -> None:
        """Learn the noted norms: at the end of a backward, or when asked."""
        if not self._told:
            return
        with _LOCK, torch.inference_mode(False), torch.no_grad():
            while self._told:
                first = self._told.popleft()
                together = {first.layer: first.squared}
                while self._told and self._told[0].key == first.key and self._told[0].layer not in together:
                    told = self._told.popleft()
                    together[told.layer] = told.squared
                self._learn(first.samples, first.tokens, together)
                first.tokens.forget()

    def _learn(self, samples: Tensor | None, tokens: Tokens, told: dict[str, Tensor]) -> None:
        mask, squared = tokens.mask, torch.stack(list(told.values()))  # [layers, batch, seq]
        self._layers.update({name: LayerNorms(squared.device) for name in told if name not in self._layers})
        layers = [self._layers[name] for name in told]
        longest = max(mask.shape[1], *(len(norms.start) for norms in layers))
        for norms in layers:
            norms.fit(squared.device, longest)
        pads, reference = _stacked(layers, "pads"), _stacked(layers, "reference")
        of_pads = (squared * ~mask).sum((1, 2))
        squared = squared * mask
        total = squared.sum((1, 2))
        is_good = total.isfinite() & (total > 0)  # one that is zero altogether (lora_B's first) says nothing of pads
        none = torch.where(mask.all() | ~is_good, pads, pads.clamp_min(ZERO))
        _give(layers, "pads", torch.where(of_pads.isfinite() & (of_pads > 0), NONZERO, none).to(torch.int8))
        if self.kind is None:
            return
        mean = torch.where(is_good, total / mask.sum().clamp_min(1), 1.0)
        reference = torch.where(is_good & (reference == 0), mean, reference)
        _give(layers, "reference", reference)
        relative = squared / mean[:, None, None]
        if self.samples:
            of_sample = squared.sum(2) / tokens.lengths.clamp_min(1)
            relative = squared / of_sample.where(of_sample > 0, 1.0)[:, :, None]
            of_sample = of_sample / reference.where(reference > 0, 1.0)[:, None]
            for name, *of_layer in zip(told, layers, of_sample, is_good, strict=True):
                if (places := self._places(name, samples, tokens)) is not None:
                    self._remember(places, *of_layer)
        for name, position in (("start", tokens.from_start.flatten()), ("end", tokens.from_end.flatten())):
            profile = _stacked(layers, name)
            zeros = torch.zeros_like(profile)
            count = zeros[0].index_add(0, position, mask.flatten().float())
            found = zeros.index_add(1, position, relative.flatten(1)) / count.clamp_min(1)
            mixed = torch.where(profile < 0, found, torch.lerp(profile, found, RATE))
            _give(layers, name, torch.where((count > 0) & is_good[:, None], mixed, profile))

    def _places(self, layer: str, samples: Tensor | None, tokens: Tokens) -> Tensor | None:
        """Return the samples' places in the layer's table; None without one, or if rows are choices of one sample."""
        if not self.samples or layer not in self.known or samples is None or len(samples) != len(tokens.mask):
            return None
        return samples.to(tokens.mask.device, non_blocking=True)

    def _remember(self, samples: Tensor, norms: LayerNorms, squared: Tensor, is_good: Tensor) -> None:
        if not len(norms.samples):
            norms.samples = norms.samples.new_zeros(self.samples)
        codes = (torch.log2(squared.clamp_min(1e-30)) / 2 * _STEPS + _MIDDLE).round().clamp(1, 255).to(torch.uint8)
        codes = torch.where(is_good, codes, norms.samples[samples])
        norms.samples.scatter_reduce_(0, samples, codes, "amax", include_self=False)  # of one seen twice: no race

    def pads(self) -> Iterator[tuple[list[str], Tensor]]:
        """Yield for each device the names of its layers, and the states of their pads ``[layers]``."""
        known = {name: norms.pads for name, norms in self.layers.items() if has_numbers(norms.pads)}
        for device in {pads.device for pads in known.values()}:
            names = [name for name, pads in known.items() if pads.device == device]
            yield names, torch.stack([known[name] for name in names])

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned, as tensors on the CPU."""
        return {
            f"{name}/{key}": value.cpu().clone()
            for name, norms in self.layers.items()
            for key, value in vars(norms).items()
            if key != "samples" or len(value)
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Load what another run has learned, without layers that this model lacks."""
        self._layers, self._told = {}, deque()
        for full, value in state.items():
            name, _, key = full.rpartition("/")
            if name in self.known and (key != "samples" or len(value) == self.samples):
                setattr(self._layers.setdefault(name, LayerNorms(device)), key, value.to(device, copy=True))


def _stacked(layers: list[LayerNorms], name: str) -> Tensor:
    return torch.stack([getattr(norms, name) for norms in layers])


def _give(layers: list[LayerNorms], name: str, values: Tensor) -> None:
    for norms, value in zip(layers, values.unbind(), strict=True):
        setattr(norms, name, value)
