"""Fit f'∘f⁻¹ of every activation in inverse.py, and write inverse_fits.json, both of hf_memsave/ops/approximate.

    python scripts/bench/fit_inverse.py

Each side of the minimum gets a minimax polynomial in s = √(y - y_min), by linear programming (:mod:`scipy.optimize`):
the smallest e for which |model - f'| <= e at every sample. See hf_memsave/ops/approximate/inverse.py for the model;
scripts/bench/inverse_errors.py measures what it leaves. A new activation is one entry in that table, and a run of both.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.polynomial import Chebyshev, Polynomial
from numpy.polynomial.chebyshev import chebvander
from scipy.optimize import brentq, linprog
from torch import Tensor

from hf_memsave.ops.approximate.inverse import ACTIVATIONS, InverseFit

TARGET = Path(__file__).resolve().parents[2] / "hf_memsave" / "ops" / "approximate" / "inverse_fits.json"
LEFT_COEFFICIENTS = 7
RIGHT_COEFFICIENTS = 10
#: Beyond the cut the slope is taken as 1; at the cut it still differs from 1 by this.
AT_CUT = 2.5e-4
SAMPLES = 3000
Function = Callable[[Tensor], Tensor]


def values(f: Function, x: np.ndarray | float) -> np.ndarray:
    """f(x) in float64."""
    return f(torch.as_tensor(x, dtype=torch.float64)).numpy()


def slopes(f: Function, x: np.ndarray | float) -> np.ndarray:
    """f'(x) in float64, by autograd."""
    leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(f(leaf).sum(), leaf)[0].numpy()


def fit(f: Function) -> InverseFit:
    """The fit of ``f``, which must fall from 0 to one minimum and then rise, its slope to above 1 and down to 1."""
    turn = brentq(lambda x: slopes(f, x), -5, 0, xtol=1e-15)
    minimum = float(values(f, turn))
    x = np.linspace(turn, 60, 6001)
    last = x[slopes(f, x) > 1 + AT_CUT][-1]
    cut = brentq(lambda x: slopes(f, x) - 1 - AT_CUT, last, last + 0.1)
    left = _minimax(f, turn - np.geomspace(1e-4, 60, SAMPLES), minimum, LEFT_COEFFICIENTS, is_left=True)
    right = turn + np.concatenate([np.geomspace(1e-4, 0.1, SAMPLES // 10), np.linspace(0.1, cut - turn, SAMPLES)])
    high = float(np.float32(minimum))
    return InverseFit(
        turn, (high, minimum - high), float(values(f, cut)), left, _minimax(f, right, minimum, RIGHT_COEFFICIENTS)
    )


def _minimax(f: Function, x: np.ndarray, minimum: float, count: int, is_left: bool = False) -> tuple[float, ...]:
    y = values(f, x)
    s = np.sqrt(np.maximum(y - minimum, 0))
    end = math.sqrt(-minimum) if is_left else s[-1]
    basis = chebvander(2 * s / end - 1, count - 1) * (s * y if is_left else s)[:, None]
    bound = np.ones((len(x), 1))
    target = slopes(f, x)
    found = linprog(
        [0] * count + [1],
        np.block([[basis, -bound], [-basis, -bound]]),
        np.concatenate([target, -target]),
        bounds=[(None, None)] * count + [(0, None)],
    )
    powers = Chebyshev(found.x[:-1], domain=[0, end]).convert(kind=Polynomial)
    return tuple(float(c) for c in powers.coef)


def rounded(found: InverseFit) -> InverseFit:
    """The fit with coefficients of 10 digits (fp32 has 8), T and the minimum in full."""
    left, right = (tuple(float(f"{c:.10g}") for c in side) for side in (found.left, found.right))
    return found._replace(cut=float(f"{found.cut:.10g}"), left=left, right=right)


def main() -> int:
    """Fit and write."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    fits = {name: rounded(fit(a))._asdict() for name, a in ACTIVATIONS.items()}
    TARGET.write_text(json.dumps(fits, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
