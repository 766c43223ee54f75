"""The law of a draw, by integrating an estimator over its uniform numbers, and what follows from it."""

from fractions import Fraction
from itertools import pairwise

import torch

from hf_memsave.ops.sampled.estimators import ESTIMATORS
from hf_memsave.ops.sampled.sampler import Sampler


def tails(p):
    """The mass outside of the c largest, c = 0 ... m, without rounding."""
    found = [Fraction(0)]
    for value in sorted(map(Fraction, p.tolist())):
        found.append(found[-1] + value)
    return found[::-1]


def best_count(p, k):
    """|C| of Theorem 2, by trying all."""
    mass = tails(p)
    return min(range(k), key=lambda c: mass[c] / (k - c))


def law_of(name, p, k):
    """Probability, index and scale of each of the k draws, each ``[k, pieces]``.

    An estimator is constant in u between the places where a draw passes from one pair to the next. They follow from p
    alone, in rational numbers; the estimator is asked once between any two of them.
    """
    p = p.detach().cpu().double()
    mass = tails(p)
    c = best_count(p, k) if name == "wta" else 0
    count, rows = k - c if name == "wta" else 1, []
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
    return [torch.stack(column) for column in zip(*padded, strict=True)]


def expected_weights(name, p, k):
    """E[sum of the scales with which pair i is drawn], ``[m]``: 1 for every pair where it is unbiased."""
    probability, index, scale = law_of(name, p, k)
    weights = (probability * scale).flatten()
    return torch.zeros(p.shape[-1], dtype=torch.float64).index_add(0, index.flatten(), weights)


def variance(name, p, k, pairs):
    """E‖estimate - mean‖² of ``Σ_i pairs_i``, for pairs ``[m, d]``: the draws are independent of each other."""
    probability, index, scale = law_of(name, p, k)
    drawn = scale[..., None] * pairs[index]
    mean = (probability[..., None] * drawn).sum(1)
    return float((probability * drawn.square().sum(-1)).sum() - mean.square().sum())


class Watched(Sampler):
    """A sampler that says what it drew from."""

    def choose(self, p, k, layer, batch, *drawing):
        self.p, self.k = p, k
        return super().choose(p, k, layer, batch, *drawing)


def standard_errors(estimates, truth):
    """The norm of the mean error of estimates ``[n, ...]``, over what unbiased ones lead to expect: about 1."""
    flat = estimates.double().flatten(1)
    error = flat.mean(0) - truth.double().flatten()
    spread = flat.var(0).sum() / len(flat)
    return float(error.norm() / spread.sqrt())
