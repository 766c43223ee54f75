r"""The norms of output gradients of earlier steps, by which rows are drawn before backward knows the real ones.

For token t of sample b, a layer's predicted norm is ``s_b √(½ (P_t + Q_e))``:

- P: a running mean of the squared norms at position t, and Q: at position e from the end, each relative to the batch's
  mean (to the sample's, where s is known). Sequences end where they like: P knows a classifier's first token, Q a
  causal model's last. A few KB a layer.
- s: the sample's own norm when it was last seen, in steps of 1/8 octave: one byte a sample and layer.

A wrong prediction costs variance and never makes a bias. Where a layer's pads had no gradient, they are not drawn from
then on; each backward looks again, and takes that back where one has.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hf_memsave.device import has_numbers
from hf_memsave.sampling.batch import Batch, Tokens

#: Weight of the newest step in a running mean.
RATE = 0.1
#: States of a layer's pads.
UNSEEN, ZERO, NONZERO = 0, 1, 2
_STEPS, _MIDDLE = 8, 128


class LayerNorms:
    """One layer's profiles, on the device of its gradients.

    Attributes:
        start: P, fp32 ``[longest sequence]``; negative where nothing was seen.
        end: Q, likewise.
        reference: The first batch's mean squared norm; samples' norms are kept relative to it.
        pads: Whether pads had a gradient: :data:`UNSEEN`, :data:`ZERO` or :data:`NONZERO`.
    """

    def __init__(self, device: torch.device) -> None:
        self.start = torch.empty(0, device=device)
        self.end = torch.empty(0, device=device)
        self.reference = torch.zeros((), device=device)
        self.pads = torch.zeros((), dtype=torch.int8, device=device)

    def grow(self, length: int) -> None:
        """Make room for sequences of ``length`` tokens."""
        if (missing := length - len(self.start)) > 0:
            unseen = self.start.new_full((missing,), -1.0)
            self.start, self.end = torch.cat([self.start, unseen]), torch.cat([self.end, unseen])


class NormCache:
    """The norms of every sampled layer of a model.

    Args:
        kind: Field ``cache`` of :class:`~hf_memsave.WTACRS`.
        samples: How many the table of samples has room for; 0 for no table.
    """

    def __init__(self, kind: str | None, samples: int) -> None:
        self.kind, self.samples = kind, samples
        self.layers: dict[str, LayerNorms] = {}
        self.rows: dict[str, int] = {}
        self._table: Tensor | None = None
        self._pending: list[tuple[str, Tensor, Tensor]] = []

    @property
    def nbytes(self) -> int:
        """The most that the table of samples takes, on the CPU (less until every sample has been seen)."""
        return self.samples * len(self.rows)

    def know(self, layer: str) -> None:
        """Make room for a layer that may ask."""
        if layer not in self.rows:
            self.rows[layer] = len(self.rows)
            if self._table is not None:
                self._table = torch.cat([self._table, self._table.new_zeros(1, self.samples)])

    def predict(self, layer: str, batch: Batch, tokens: Tokens | None) -> Tensor | None:
        """Expected gradient norms ``[batch, seq]``, to any scale; None if nothing is known."""
        norms = self.layers.get(layer)
        if self.kind is None or norms is None or tokens is None:
            return None
        norms.grow(tokens.mask.shape[1])
        start, end = (p.where(p >= 0, 1.0) for p in (norms.start, norms.end))
        predicted = ((start[tokens.from_start] + end[tokens.from_end]) / 2).sqrt()
        factor = self._factor(layer, batch, tokens, predicted.device)
        return predicted if factor is None else predicted * factor[:, None]

    def allowed(self, layer: str, tokens: Tokens | None) -> Tensor | None:
        """Which rows may have to be drawn, boolean ``[batch, seq]``: pads only until a backward found theirs zero."""
        norms = self.layers.get(layer)
        if norms is None or tokens is None:
            return None
        return tokens.mask | (norms.pads != ZERO)

    def update(self, layer: str, batch: Batch, tokens: Tokens | None, squared: Tensor) -> None:
        """Learn from one backward; a gradient that is not finite (a loss scaler's) teaches nothing.

        Args:
            layer: Whose.
            batch: The forward that it belongs to.
            tokens: Which rows are real.
            squared: Squared norms of the output's gradient, fp32 ``[batch, seq]``.
        """
        if tokens is None:
            return
        if layer not in self.layers:
            self.layers[layer] = LayerNorms(squared.device)
        norms = self.layers[layer]
        mask = tokens.mask
        of_pads = (squared * ~mask).sum()
        squared = squared * mask
        total = squared.sum()
        is_good = total.isfinite() & (total > 0)  # one that is zero altogether (lora_B's first) says nothing of pads
        none = torch.where(mask.all() | ~is_good, norms.pads, norms.pads.clamp_min(ZERO))
        norms.pads = torch.where(of_pads.isfinite() & (of_pads > 0), NONZERO, none).to(torch.int8)
        if self.kind is None:
            return
        mean = torch.where(is_good, total / mask.sum().clamp_min(1), 1.0)
        norms.reference = torch.where(is_good & (norms.reference == 0), mean, norms.reference)
        relative = squared / mean
        if self.samples:
            of_sample = squared.sum(1) / tokens.lengths.clamp_min(1)
            relative = squared / of_sample.where(of_sample > 0, 1.0)[:, None]
            self._remember(layer, batch, tokens, of_sample / norms.reference.where(norms.reference > 0, 1.0), is_good)
        norms.grow(mask.shape[1])
        for name, position in (("start", tokens.from_start), ("end", tokens.from_end)):
            profile = getattr(norms, name)
            zeros = torch.zeros_like(profile)
            count = zeros.index_add(0, position.flatten(), mask.flatten().float())
            found = zeros.index_add(0, position.flatten(), relative.flatten()) / count.clamp_min(1)
            mixed = torch.where(profile < 0, found, torch.lerp(profile, found, RATE))
            setattr(norms, name, torch.where((count > 0) & is_good, mixed, profile))

    def layers_with_pads(self) -> list[str]:
        """Layers whose pads have been seen to have a gradient."""
        known = {name: norms.pads[None] for name, norms in self.layers.items() if has_numbers(norms.pads)}
        return [name for name, pads in zip(known, to_host([*known.values()]), strict=True) if int(pads) == NONZERO]

    def flush(self) -> None:
        """Write what backward has found of each sample to the table."""
        found = to_host([codes for _, _, codes in self._pending])
        for (layer, samples, _), codes in zip(self._pending, found, strict=True):
            if self._table is None:
                self._table = torch.zeros(len(self.rows), self.samples, dtype=torch.uint8)
            known = codes > 0
            self._table[self.rows[layer], samples[known]] = codes[known]
        self._pending.clear()

    def _has_samples(self, layer: str, batch: Batch, tokens: Tokens) -> bool:
        """Whether the table knows the rows of the layer's input: not where each choice of a sample is a row."""
        has_table = self.samples > 0 and layer in self.rows
        return has_table and batch.samples is not None and len(batch.samples) == len(tokens.mask)

    def _remember(self, layer: str, batch: Batch, tokens: Tokens, squared: Tensor, is_good: Tensor) -> None:
        if not self._has_samples(layer, batch, tokens):
            return
        code = (torch.log2(squared.clamp_min(1e-30)) / 2 * _STEPS + _MIDDLE).round().clamp(1, 255)
        self._pending.append((layer, batch.samples, torch.where(is_good, code, 0).to(torch.uint8)))

    def _factor(self, layer: str, batch: Batch, tokens: Tokens, device: torch.device) -> Tensor | None:
        """The factor s of each sample, ``[batch]``; the mean of those known for one never seen, None if none is."""
        if not self._has_samples(layer, batch, tokens) or self._table is None:
            return None
        codes = self._table[self.rows[layer], batch.samples]
        known = codes > 0
        if not known.any():
            return None
        factor = torch.exp2((codes.float() - _MIDDLE) / _STEPS)
        return factor.where(known, factor[known].mean()).to(device, non_blocking=True)

    def state_dict(self) -> dict[str, Any]:
        """Everything learned, as tensors on the CPU."""
        self.flush()
        state: dict[str, Any] = {}
        for name, norms in self.layers.items():
            for key, value in vars(norms).items():
                state[f"{name}/{key}"] = value.cpu().clone()
            if self._table is not None and name in self.rows:
                state[f"{name}/samples"] = self._table[self.rows[name]].clone()
        return state

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Take over what another run has learned; layers that this model lacks are left out."""
        self.layers, self._table, self._pending = {}, None, []
        for full, value in state.items():
            name, _, key = full.rpartition("/")
            if name not in self.rows:
                continue
            if key == "samples":
                if len(value) == self.samples:
                    if self._table is None:
                        self._table = torch.zeros(len(self.rows), self.samples, dtype=torch.uint8)
                    self._table[self.rows[name]] = value
                continue
            setattr(self.layers.setdefault(name, LayerNorms(device)), key, value.to(device))


def merged(states: list[dict[str, Any]]) -> dict[str, Any]:
    """One state of many processes': profiles are averaged; of a sample, the last process that saw it counts."""
    result: dict[str, Any] = {}
    for name in {name: None for state in states for name in state}:
        values = [state[name] for state in states if name in state]
        key = name.rpartition("/")[2]
        if key in ("start", "end"):
            longest = max(map(len, values))
            padded = torch.stack([torch.nn.functional.pad(v, (0, longest - len(v)), value=-1.0) for v in values])
            seen = padded >= 0
            mean = (padded * seen).sum(0) / seen.sum(0).clamp_min(1)
            result[name] = mean.where(seen.any(0), -1.0)
        elif key == "samples":
            table = values[0].clone()
            for value in values[1:]:
                table = torch.where(value > 0, value, table)
            result[name] = table
        elif key == "reference":
            known = [float(v) for v in values if v > 0]
            result[name] = torch.tensor(math.fsum(known) / len(known) if known else 0.0)
        else:
            result[name] = torch.stack(values).max(0).values
    return result


def to_host(tensors: list[Tensor]) -> list[Tensor]:
    """Vectors of one dtype, on the CPU: the host waits once for each device that they are on."""
    found: dict[int, Tensor] = {}
    for device in {tensor.device for tensor in tensors}:
        mine = [i for i, tensor in enumerate(tensors) if tensor.device == device]
        parts = torch.cat([tensors[i] for i in mine]).cpu().split([len(tensors[i]) for i in mine])
        found.update(zip(mine, parts, strict=True))
    return [found[i] for i in range(len(tensors))]
