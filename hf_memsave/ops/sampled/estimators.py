r"""Column-row sampling of a matrix product ``XᵀY = Σ_i x_i y_iᵀ``, of which only k of the m pairs are computed.

Pair i is drawn with probability p_i. With T_c the mass outside of the c largest p, and C the set of those c pairs::

    "crs"    Σ_t x_i y_iᵀ / (k p_i)                            k draws from p                              (Eq. 5)
    "wta"    Σ_C x_i y_iᵀ + Σ_t x_i y_iᵀ T_c / ((k - c) p_i)   k - c draws from p outside C                (Eq. 6)
    "topk"   Σ_i x_i y_iᵀ                                      the k largest p: biased, a baseline only

where c minimises T_c / (k - c) (Theorem 2). "crs" and "wta" are unbiased for every p that is positive where
x_i y_iᵀ is not zero. The draws of "wta" are stratified (one from each of k - c equal slices of the mass), which never
has more variance than independent ones.

All run batched over leading dimensions, in float64 (MPS: float32), without a transfer to the host.
Source: Liu et al. (2023), arXiv:2305.15265; Drineas, Kannan and Mahoney (2006).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

#: The least share of the activation norms' own distribution in p: see :func:`probabilities`.
MIX = 0.1


class Draw(NamedTuple):
    """The pairs to compute, int64 ``[*, k]``, and the factor of each, fp32 ``[*, k]``."""

    index: Tensor  # type: ignore[assignment]  # a tuple's method, asked of no draw
    scale: Tensor


def probabilities(norms: Tensor, predicted: Tensor | None = None, allowed: Tensor | None = None) -> Tensor:
    r"""Compute the distribution to draw from, of ‖x_i‖ ``[*, m]`` and a prediction g_i of ‖y_i‖, to any scale (Eq. 3).

    ::

        p_i = 0.9 ‖x_i‖ g_i / Σ ‖x_j‖ g_j + 0.1 ‖x_i‖ / Σ ‖x_j‖

    The second term keeps any prediction harmless (zero, stale, of another sample): no row is scaled up beyond
    ``10 Σ ‖x_j‖ / k``, since Theorem 2 makes T_c / (k - c) at most 1 / k. Where a norm is not finite, its row gets
    nearly all the mass, so that its product is seen. Where ``allowed`` is False, p_i is 0.

    Returns:
        p ``[*, m]``, float64 (float32 on MPS), with sum 1; uniform over what is allowed where all norms are 0.
    """
    a = norms.to(torch.float32 if norms.device.type == "mps" else torch.float64)
    a = a if allowed is None else a * allowed  # before what follows: a NaN at a pad stays one
    finite = a.isfinite()
    a = torch.where(finite, a, 0.0)
    a = torch.where(finite, a, (1 + a.sum(-1, keepdim=True)) * 1e6)
    total = a.sum(-1, keepdim=True)
    uniform = torch.ones_like(a) if allowed is None else allowed.to(a.dtype).expand_as(a)
    a = torch.where(total > 0, a, uniform)
    p = a / a.sum(-1, keepdim=True)
    if predicted is not None:
        product = a * predicted.to(a.dtype).clamp_min(0)
        mass = product.sum(-1, keepdim=True)
        p = torch.where((mass > 0) & mass.isfinite(), (1 - MIX) * (product / mass) + MIX * p, p)
    return p


def wta(p: Tensor, k: int, u: Tensor) -> Draw:
    """Draw k pairs by winner-take-all (Eq. 6) from p ``[*, m]`` and uniform u ``[*, k]``; first C, with scale 1."""
    order, tail = _sorted_tails(p)
    c = winners(tail, k)
    slot = torch.arange(k, device=p.device)
    count = k - c
    mass = tail.gather(-1, c)
    position, scale = _inverse_tail(tail, mass * (slot - c + 1 - u) / count)
    is_winner = slot < c
    index = order.gather(-1, torch.where(is_winner, slot, position))
    return Draw(index, torch.where(is_winner, 1.0, mass / count * scale).float())


def crs(p: Tensor, k: int, u: Tensor) -> Draw:
    """Draw k pairs by column-row sampling (Eq. 5): independently, with replacement; arguments as for :func:`wta`."""
    order, tail = _sorted_tails(p)
    mass = tail[..., :1]
    position, scale = _inverse_tail(tail, mass * (1 - u))
    return Draw(order.gather(-1, position), (mass / k * scale).float())


def topk(p: Tensor, k: int, u: Tensor | None = None) -> Draw:
    """Return the pairs of the k largest p, with scale 1: biased, as the others are never seen."""
    index = p.topk(k, dim=-1).indices
    return Draw(index, torch.ones(index.shape, device=p.device))


def winners(tail: Tensor, k: int) -> Tensor:
    """Return |C| in 0 ... k - 1, ``[*, 1]``, by Theorem 2; ``tail`` is T_0, T_1, ... ``[*, m + 1]``."""
    left = k - torch.arange(k, device=tail.device)
    return (tail[..., :k] / left).argmin(-1, keepdim=True)


#: Field ``estimator`` of :class:`~hf_memsave.WTACRS` -> function.
ESTIMATORS: dict[str, Callable[[Tensor, int, Tensor], Draw]] = {"wta": wta, "crs": crs, "topk": topk}


def row_norms(x: Tensor) -> Tensor:
    """Compute Euclidean norms over the last dimension, in fp32 at least."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))


class Drawing(NamedTuple):
    """The functions that compute draws: this module's, or kernels."""

    row_norms: Callable[[Tensor], Tensor]
    probabilities: Callable[..., Tensor]
    draw: Callable[[str, Tensor, int, Tensor], Draw]


#: Draws by PyTorch's own functions.
EAGER = Drawing(row_norms, probabilities, lambda estimator, p, k, u: ESTIMATORS[estimator](p, k, u))


def _sorted_tails(p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the order of falling p ``[*, m]``, and T_0 = 1, ..., T_m = 0, summed from the small end: none negative."""
    values, order = p.sort(dim=-1, descending=True, stable=True)
    tail = values.flip(-1).cumsum(-1).flip(-1)
    return order, torch.nn.functional.pad(tail, (0, 1))


def _inverse_tail(tail: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the j with T_{j+1} < v <= T_j of each v ``[*, k]``, and 1 / p_j, or 0 where v is 0 (no mass left)."""
    # p_j is taken as T_j - T_{j+1}, which is how often j is drawn: rounding cannot make that a bias.
    m = tail.shape[-1] - 1
    position = (m - torch.searchsorted(tail.flip(-1).contiguous(), v.contiguous())).clamp(0, m - 1)
    drawn = tail.gather(-1, position) - tail.gather(-1, position + 1)
    return position, torch.where((v > 0) & (drawn > 0), 1 / drawn, 0.0)
