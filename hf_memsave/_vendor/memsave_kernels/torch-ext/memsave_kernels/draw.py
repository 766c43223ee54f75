r"""Which pairs of a sampled product to compute: three launches around a sort, in float64, the same every time.

With norms a_i (what is not finite gets nearly all the mass) and predictions g_i of the other factor's::

    p_i = .9 a_i g_i / Σ a_j g_j + .1 a_i / Σ a_j                  a_i / Σ a_j without a prediction
    T_j = the sum of all but the j largest p
    c   = argmin T_j / (k - j),  j < k                             0 for "crs"
    the c largest, times 1; k - c drawn of the rest, each times T_c / ((k - c) p_i)

The draws of "wta" are stratified: one of each of k - c slices of the mass; those of "crs" are independent. p_i is taken
as T_j - T_{j+1}, which is how often it is drawn. Source: Liu et al. (2023), arXiv:2305.15265, Eqs. 3, 5, 6, Theorem 2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._define import define
from ._launch import ceil_div, launch, like

_BLOCK = 1024


@triton.jit
def _norm(norms_ptr, allowed_ptr, at, inside):
    """Norms in float64, 0 for what is not allowed, and which are finite."""
    a = tl.load(norms_ptr + at, mask=inside, other=0.0).to(tl.float64)
    if allowed_ptr is not None:
        a *= tl.load(allowed_ptr + at, mask=inside, other=0).to(tl.float64)
    return a, tl.abs(a) < float("inf")


@triton.jit
def _weight(norms_ptr, allowed_ptr, at, inside, large, has_mass):
    """Norms, with ``large`` for what is not finite; the same for all that is allowed where there is no mass."""
    a, is_finite = _norm(norms_ptr, allowed_ptr, at, inside)
    a = tl.where(is_finite, a, large)
    if allowed_ptr is None:
        even = inside.to(tl.float64)
    else:
        even = tl.load(allowed_ptr + at, mask=inside, other=0).to(tl.float64)
    return tl.where(has_mass, a, even)


@triton.jit
def _reciprocal(n):
    """1 / n in float64 by Newton's method: its division is a function call, with a stack."""
    n = n.to(tl.float64)
    r = (1.0 / n.to(tl.float32)).to(tl.float64)
    r = r * (2.0 - n * r)
    return r * (2.0 - n * r)


@triton.jit
def probabilities_kernel(norms_ptr, predicted_ptr, allowed_ptr, p_ptr, m, BLOCK: tl.constexpr):
    """The distribution of one row."""
    row = tl.program_id(0).to(tl.int64) * m
    finite = tl.zeros([BLOCK], dtype=tl.float64)
    others = tl.zeros([BLOCK], dtype=tl.float64)
    for first in range(0, m, BLOCK):
        at = first + tl.arange(0, BLOCK)
        a, is_finite = _norm(norms_ptr, allowed_ptr, row + at, at < m)
        finite += tl.where(is_finite, a, 0.0)
        others += tl.where(is_finite, 0.0, 1.0)
    large = (1.0 + tl.sum(finite, axis=0)) * 1e6
    has_mass = tl.sum(finite, axis=0) + large * tl.sum(others, axis=0) > 0
    total = tl.zeros([BLOCK], dtype=tl.float64)
    product = tl.zeros([BLOCK], dtype=tl.float64)
    for first in range(0, m, BLOCK):
        at = first + tl.arange(0, BLOCK)
        a = _weight(norms_ptr, allowed_ptr, row + at, at < m, large, has_mass)
        total += a
        if predicted_ptr is not None:
            g = tl.load(predicted_ptr + row + at, mask=at < m, other=0.0).to(tl.float64)
            product += a * tl.where(g < 0, 0.0, g)
    total_mass, product_mass = tl.sum(total, axis=0), tl.sum(product, axis=0)
    for first in range(0, m, BLOCK):
        at = first + tl.arange(0, BLOCK)
        a = _weight(norms_ptr, allowed_ptr, row + at, at < m, large, has_mass)
        p = a / total_mass
        if predicted_ptr is not None:
            g = tl.load(predicted_ptr + row + at, mask=at < m, other=0.0).to(tl.float64)
            mixed = 0.9 * (a * tl.where(g < 0, 0.0, g) / product_mass) + 0.1 * p
            p = tl.where((product_mass > 0) & (product_mass < float("inf")), mixed, p)
        tl.store(p_ptr + row + at, p, mask=at < m)


@triton.jit
def tails_kernel(sorted_ptr, tail_ptr, winners_ptr, m, k, IS_WTA: tl.constexpr, BLOCK: tl.constexpr):
    """T_0 to T_m of one row, summed from the small end, and c."""
    row = tl.program_id(0).to(tl.int64)
    tl.store(tail_ptr + row * (m + 1) + m, 0.0)
    carry = tl.sum(tl.zeros([BLOCK], dtype=tl.float64), axis=0)
    least = carry + float("inf")
    winners = tl.sum(tl.zeros([BLOCK], dtype=tl.int32), axis=0)
    blocks = tl.cdiv(m, BLOCK)
    for j in range(0, blocks):
        first = (blocks - 1 - j) * BLOCK
        at = first + tl.arange(0, BLOCK)
        p = tl.load(sorted_ptr + row * m + at, mask=at < m, other=0.0)
        tail = carry + tl.cumsum(p, axis=0, reverse=True)
        tl.store(tail_ptr + row * (m + 1) + at, tail, mask=at < m)
        carry = tl.sum(tl.where(at == first, tail, 0.0), axis=0)
        if IS_WTA:
            share = tl.where((at < k) & (at < m), tail * _reciprocal(tl.maximum(k - at, 1)), float("inf"))
            here = tl.min(share, axis=0)
            where = tl.min(tl.where(share == here, at, m), axis=0)
            winners = tl.where(here <= least, where, winners)
            least = tl.minimum(here, least)
    tl.store(winners_ptr + row, winners)


@triton.jit
def draw_kernel(
    tail_ptr, order_ptr, winners_ptr, u_ptr, index_ptr, scale_ptr, m, k, IS_WTA: tl.constexpr, STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The pairs and scales of one row's slots, by binary search among the tails."""
    blocks = tl.cdiv(k, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    slot = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    is_slot = slot < k
    tail_ptr += row * (m + 1)
    c = tl.load(winners_ptr + row)
    mass = tl.load(tail_ptr + c)
    u = tl.load(u_ptr + row * k + slot, mask=is_slot, other=0.0).to(tl.float64)
    if IS_WTA:
        v = mass * (slot - c + 1 - u) / (k - c)
    else:
        v = mass * (1.0 - u)
    low = tl.zeros([BLOCK], dtype=tl.int32)  # of all T before it at least v, of those from high on less
    high = low + m + 1
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        is_open = low < high
        is_left = tl.load(tail_ptr + middle, mask=is_open & is_slot, other=0.0) >= v
        low = tl.where(is_open & is_left, middle + 1, low)
        high = tl.where(is_open & (is_left == 0), middle, high)
    position = tl.minimum(tl.maximum(low - 1, 0), m - 1)
    drawn = tl.load(tail_ptr + position, mask=is_slot, other=0.0)
    drawn -= tl.load(tail_ptr + position + 1, mask=is_slot, other=0.0)
    is_possible = (v > 0) & (drawn > 0)
    scale = tl.where(is_possible, mass / (k - c) / tl.where(is_possible, drawn, 1.0), 0.0)
    is_winner = slot < c
    place = tl.where(is_winner, slot, position)
    index = tl.load(order_ptr + row * m + place, mask=is_slot, other=0)
    tl.store(index_ptr + row * k + slot, index, mask=is_slot)
    tl.store(scale_ptr + row * k + slot, tl.where(is_winner, 1.0, scale), mask=is_slot)


def _probabilities(norms: Tensor, predicted: Tensor | None, allowed: Tensor | None) -> Tensor:
    p = _probabilities_fake(norms, predicted, allowed)
    m = norms.shape[-1]
    others = [None if t is None else t.expand(norms.shape).contiguous() for t in (predicted, allowed)]
    flags = None if others[1] is None else others[1].view(torch.uint8)
    args = (norms.contiguous(), others[0], flags, p, m)
    launch(probabilities_kernel, (norms.numel() // max(1, m),), args, {"BLOCK": _BLOCK})
    return p


def _probabilities_fake(norms: Tensor, predicted: Tensor | None, allowed: Tensor | None) -> Tensor:
    return like(norms, torch.float64)


def _draw(p: Tensor, k: int, u: Tensor, is_wta: bool) -> tuple[Tensor, Tensor]:
    index, scale = _draw_fake(p, k, u, is_wta)
    values, order = p.sort(dim=-1, descending=True, stable=True)
    m = p.shape[-1]
    rows = p.numel() // max(1, m)
    tail = p.new_empty(rows, m + 1)
    winners = p.new_empty(rows, dtype=torch.int32)
    constants = {"IS_WTA": is_wta, "BLOCK": _BLOCK}
    launch(tails_kernel, (rows,), (values.contiguous(), tail, winners, m, k), constants, 16)
    launch(
        draw_kernel, (rows * ceil_div(k, _BLOCK),),
        (tail, order.contiguous(), winners, u.contiguous(), index, scale, m, k),
        {"IS_WTA": is_wta, "STEPS": (m + 1).bit_length(), "BLOCK": _BLOCK},
    )  # fmt: skip
    return index, scale


def _draw_fake(p: Tensor, k: int, u: Tensor, is_wta: bool) -> tuple[Tensor, Tensor]:
    shape = (*p.shape[:-1], k)
    return p.new_empty(shape, dtype=torch.int64), p.new_empty(shape, dtype=torch.float32)


_probabilities_op = define(
    "probabilities(Tensor norms, Tensor? predicted, Tensor? allowed) -> Tensor", _probabilities, _probabilities_fake
)
_draw_op = define("draw(Tensor p, int k, Tensor u, bool is_wta) -> (Tensor, Tensor)", _draw, _draw_fake)


def probabilities(norms: Tensor, predicted: Tensor | None = None, allowed: Tensor | None = None) -> Tensor:
    """The distribution to draw from.

    Args:
        norms: ``[*, m]``, float32, bfloat16 or float16.
        predicted: Of the other factor's norms, to any scale, of a shape that broadcasts to norms' one; or None.
        allowed: Bool, likewise: p is 0 where it is False; or None.

    Returns:
        p ``[*, m]``, float64, with sum 1; uniform over what is allowed where all norms are 0.
    """
    return _probabilities_op(norms, predicted, allowed)


def draw(p: Tensor, k: int, u: Tensor, estimator: str = "wta") -> tuple[Tensor, Tensor]:
    """Which pairs to compute, and what to multiply each with.

    Args:
        p: ``[*, m]``, float64, as :func:`probabilities` returns it.
        k: How many, 1 to m.
        u: Uniform numbers in [0, 1), ``[*, k]``.
        estimator: ``"wta"`` or ``"crs"``.

    Returns:
        int64 ``[*, k]``, the winners first, and float32 ``[*, k]``.

    Raises:
        ValueError: There is no such estimator, or k does not fit.
    """
    if estimator not in ("wta", "crs") or not 1 <= k <= p.shape[-1]:
        raise ValueError(f"expected 'wta' or 'crs' and k from 1 to {p.shape[-1]}, got {estimator!r} and {k}")
    return _draw_op(p, k, u, estimator == "wta")
