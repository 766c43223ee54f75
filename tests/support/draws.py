"""The law of a draw, by integrating an estimator over its uniform numbers, and what follows from it."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hf_memsave.sampling.estimators import ESTIMATORS
from hf_memsave.sampling.sampler import Sampler


class Law(NamedTuple):
    """Of each of the k draws: which (pair, scale) comes with which probability, each ``[k, pieces]``."""

    probability: Tensor
    index: Tensor
    scale: Tensor


def tails(p: Tensor) -> list[Fraction]:
    """The mass outside of the c largest, c = 0 ... m, without rounding."""
    found = [Fraction(0)]
    for value in sorted(map(Fraction, p.tolist())):
        found.append(found[-1] + value)
    return found[::-1]


def best_count(p: Tensor, k: int) -> int:
    """|C| of Theorem 2, by trying all."""
    mass = tails(p)
    return min(range(k), key=lambda c: mass[c] / (k - c))


def law_of(name: str, p: Tensor, k: int) -> Law:
    """An estimator is constant in u between the places where a draw passes from one pair to the next.

    Those follow from p alone, in rational numbers; the estimator is asked once between any two of them.
    """
    p = p.detach().cpu().double()
    mass = tails(p)
    c = best_count(p, k) if name == "wta" else 0
    count = k - c if name == "wta" else 1
    rows = []
    for slot in range(k):
        stratum = slot - c if name == "wta" else 0
        cuts = {Fraction(0), Fraction(1)}
        if slot >= c and mass[c] > 0 and name != "topk":
            cuts |= {stratum + 1 - tail * count / mass[c] for tail in mass}
        ends = sorted(cut for cut in cuts if 0 <= cut <= 1)
        middle = torch.tensor([float((a + b) / 2) for a, b in pairwise(ends)], dtype=torch.float64)
        u = torch.full((len(middle), k), 0.5, dtype=torch.float64)
        u[:, slot] = middle
        draw = ESTIMATORS[name](p.expand(len(middle), -1), k, u)
        width = torch.tensor([float(b - a) for a, b in pairwise(ends)], dtype=torch.float64)
        rows.append((width, draw.index[:, slot], draw.scale[:, slot].double()))
    longest = max(len(row[0]) for row in rows)
    padded = [[torch.nn.functional.pad(t, (0, longest - len(t))) for t in row] for row in rows]
    return Law(*(torch.stack(column) for column in zip(*padded, strict=True)))


def expected_weights(name: str, p: Tensor, k: int) -> Tensor:
    """E[sum of the scales with which pair i is drawn], ``[m]``: 1 for every pair where it is unbiased."""
    law = law_of(name, p, k)
    return torch.zeros(p.shape[-1], dtype=torch.float64).index_add(
        0, law.index.flatten(), (law.probability * law.scale).flatten()
    )


def variance(name: str, p: Tensor, k: int, pairs: Tensor) -> float:
    """E‖estimate - mean‖² of ``Σ_i pairs_i``, for pairs ``[m, d]``: the draws are independent of each other."""
    law = law_of(name, p, k)
    drawn = law.scale[..., None] * pairs[law.index]
    mean = (law.probability[..., None] * drawn).sum(1)
    return float((law.probability * drawn.square().sum(-1)).sum() - mean.square().sum())


class Watched(Sampler):
    """A sampler that says what it drew from."""

    p: Tensor
    k: int

    def choose(self, p, k, layer, batch, *drawing):
        self.p, self.k = p, k
        return super().choose(p, k, layer, batch, *drawing)


def standard_errors(estimates: Tensor, truth: Tensor) -> float:
    """The norm of the mean error, over what it is expected to be of unbiased estimates ``[n, ...]``: about 1 then.

    One number for all elements of a gradient, so no comparison is lucky because there are many.
    """
    flat = estimates.double().flatten(1)
    error = flat.mean(0) - truth.double().flatten()
    spread = flat.var(0).sum() / len(flat)
    return float(error.norm() / spread.sqrt())
