"""Draws of rows by three launches around a sort; and the rows, scaled, by one."""

from __future__ import annotations

from torch import Tensor

from hf_memsave.ops.fused.codes import are_wanted
from hf_memsave.ops.fused.kernels import kernels
from hf_memsave.sampling import estimators
from hf_memsave.sampling.estimators import EAGER, Draw, Drawing


def drawing_for(x: Tensor) -> Drawing:
    """What draws the rows of x: kernels where they are wanted."""
    return FUSED_DRAWING if are_wanted(x) else EAGER


def scaled_rows(x: Tensor, index: Tensor, scale: Tensor) -> Tensor:
    """The rows of x ``[*, N]`` at ``index`` ``[k]``, each times its scale, ``[k, N]``."""
    rows: Tensor = kernels().gather_rows(x.reshape(-1, x.shape[-1]), index, scale)
    return rows


def _row_norms(x: Tensor) -> Tensor:
    norms: Tensor = kernels().row_norms(x)
    return norms


def _probabilities(norms: Tensor, predicted: Tensor | None = None, allowed: Tensor | None = None) -> Tensor:
    p: Tensor = kernels().probabilities(norms, predicted, allowed)
    return p


def _draw(estimator: str, p: Tensor, k: int, u: Tensor) -> Draw:
    if estimator == "topk":
        return estimators.draw(estimator, p, k, u)
    return Draw(*kernels().draw(p, k, u, estimator))


FUSED_DRAWING = Drawing(_row_norms, _probabilities, _draw)
