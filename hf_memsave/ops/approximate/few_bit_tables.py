r"""Levels for ``few_bit``: the step function of 2^b pieces that is nearest to f' on [-10, 10].

The pieces [x_i, x_i+1) and their levels l_i minimise, over all choices of the 2^b - 1 inner boundaries,

    Σ_i ∫ (f'(x) - l_i)² dx,             so l_i is the mean of f' on its piece

by dynamic programming: the best cost of k + 1 pieces up to cell j is min over i of that of k pieces up to cell i and
one from i to j. The cells are the finest pieces allowed; they are narrow where f' changes (their density goes as
|f''|^(2/3), that of the best pieces for large b), so 1024 of them serve 256 pieces.

Source: Novikov et al. (2023), FewBit, Section 3 (arXiv:2202.00441), whose levels these are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hf_memsave.errors import ConfigError
from hf_memsave.ops.approximate.elementwise import ACTIVATIONS, refuse_unknown

RANGE = 10.0
_CELLS = 1024
_SAMPLES = 100_000


class Levels(NamedTuple):
    """A step function, as float32 arrays: a cached tensor would be one on no device of use, and count as kept.

    Attributes:
        boundaries: Where it steps: ``[2^b - 1]``, rising.
        levels: What it is between: ``[2^b]``.
    """

    boundaries: np.ndarray
    levels: np.ndarray


def check_bits(bits: int) -> None:
    """Raise a ConfigError for a number of bits that has no table."""
    if not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= 8:
        raise ConfigError(f"few_bits must be a whole number from 1 to 8, got {bits!r}. Leave it out for 4.")


@functools.cache
def levels(name: str, bits: int) -> Levels:
    """The step function nearest to the derivative of an activation; 8 bits take about a second, once per process."""
    check_bits(bits)
    if name not in ACTIVATIONS:
        refuse_unknown(name)
    with _disable_current_modes():  # under a mode of fake tensors there would be no numbers
        edges, slopes = _samples(ACTIVATIONS[name])
    cells = _cells(slopes)
    cuts = np.array([0, *_best_cuts(cells, slopes, 2**bits), len(slopes)])
    means = np.add.reduceat(slopes, cuts[:-1]) / np.diff(cuts)
    return Levels(edges[cuts[1:-1]].astype(np.float32), means.astype(np.float32))


def _samples(forward: Callable[[Tensor], Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Edges of equal intervals, and the mean of f' in each: the rise of f over its width."""
    edges = np.linspace(-RANGE, RANGE, _SAMPLES + 1)
    return edges, np.diff(forward(torch.from_numpy(edges)).numpy()) / np.diff(edges)


def _cells(slopes: np.ndarray) -> np.ndarray:
    """Edges of the cells, as indices of samples."""
    density = np.abs(np.gradient(slopes)) ** (2 / 3)
    share = np.cumsum(density + density.mean() / 10)
    inner = np.searchsorted(share / share[-1], np.linspace(0, 1, _CELLS + 1)[1:-1])
    return np.unique([0, len(slopes) // 2, *inner, len(slopes)])


def _best_cuts(cells: np.ndarray, slopes: np.ndarray, pieces: int) -> list[int]:
    """Where the best ``pieces`` pieces meet, as indices of samples."""
    first = np.concatenate([[0], np.cumsum(slopes)])[cells]
    second = np.concatenate([[0], np.cumsum(slopes**2)])[cells]
    i, j = np.triu_indices(len(cells), 1)
    one = np.full((len(cells), len(cells)), np.inf)
    one[i, j] = second[j] - second[i] - (first[j] - first[i]) ** 2 / (cells[j] - cells[i])
    cost, choices = one[0], []
    for _ in range(pieces - 1):
        total = cost[:, None] + one
        choices.append(total.argmin(0))
        cost = total.min(0)
    cuts = [len(cells) - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return [int(cells[c]) for c in reversed(cuts[1:])]
