"""Column-row sampling: the expected weight of every pair is 1, C is Theorem 2's, and the variance is as stated."""

from itertools import product

import pytest
import torch

from hf_memsave.ops.sampled.estimators import ESTIMATORS, probabilities, winners, wta
from support.draws import best_count, expected_weights, tails, variance
from support.helpers import DTYPES, random
from support.pairs import pairwise

M = 12
UNBIASED = ("wta", "crs")


def heavy(m=M, seed=0):
    """Norms over several orders of magnitude, as those of gradients are."""
    return (2 * random(m, seed=seed)).exp()


NORMS = {
    "heavy": heavy(), "equal": torch.ones(M), "ties": torch.tensor([3.0, 1, 1, 3, 2, 2, 2, 1, 3, 1, 2, 3]),
    "zeros": heavy() * (torch.arange(M) % 3 > 0), "all zero": torch.zeros(M),
    "one": torch.full((M,), 1e-6).index_fill(0, torch.tensor([4]), 1.0),
    "only one": torch.zeros(M).index_fill(0, torch.tensor([4]), 1.0),
    "steep": 10.0 ** -torch.arange(M, dtype=torch.float32), "tiny": heavy() * 1e-30, "huge": heavy() * 1e30,
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "k"), pairwise(UNBIASED, NORMS, [1, 2, 5, M - 1, M]))
def test_the_expected_weight_of_every_pair_is_one(device, name, kind, k):
    p = probabilities(NORMS[kind].to(device))
    expected = torch.where(p.cpu() > 0, 1.0, 0.0).double()
    torch.testing.assert_close(expected_weights(name, p, k), expected, rtol=2e-4, atol=0)
    p, precision = probabilities(heavy().to(device), heavy(seed=1).to(device)), torch.finfo(torch.float32).eps
    torch.testing.assert_close(expected_weights(name, p, k), torch.ones_like(expected), rtol=2 * precision, atol=0)


@pytest.mark.parametrize("norms", NORMS.values(), ids=NORMS)
def test_the_winners_are_theorem_2s(device, norms):
    p = probabilities(norms.to(device))
    mass = tails(p.cpu())
    tail = torch.tensor([float(t) for t in mass], dtype=torch.float64, device=device)
    for k in range(1, M + 1):
        c, best = int(winners(tail, k)), best_count(p.cpu(), k)
        assert float(mass[c] / (k - c)) == pytest.approx(float(mass[best] / (k - best)))


def test_the_winners_come_first_and_unscaled(device):
    p, k = probabilities(heavy().to(device)), 5
    c = best_count(p.cpu(), k)
    index, scale = wta(p, k, torch.rand(k, dtype=torch.float64, device=device))
    assert 0 < c < k
    assert index[:c].tolist() == p.topk(c).indices.tolist() and scale[:c].tolist() == [1.0] * c
    assert not set(index[:c].tolist()) & set(index[c:].tolist())
    assert (scale[c:] >= 1).all()


def test_topk_is_biased(device):
    p, k = probabilities(heavy().to(device)), 5
    weights = expected_weights("topk", p, k)
    assert set(weights.tolist()) == {0.0, 1.0}
    assert weights.nonzero().flatten().tolist() == sorted(p.topk(k).indices.tolist())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_leading_dimensions_are_batched(device, name):
    p = probabilities(torch.stack([norms.to(device) for norms in NORMS.values()]).view(2, 5, M))
    u = torch.rand(2, 5, 4, dtype=torch.float64, device=device)
    draw = ESTIMATORS[name](p, 4, u)
    for a in range(2):
        for b in range(5):
            one = ESTIMATORS[name](p[a, b], 4, u[a, b])
            assert torch.equal(draw.index[a, b], one.index) and torch.equal(draw.scale[a, b], one.scale)


@pytest.mark.parametrize("norms", NORMS.values(), ids=NORMS)
def test_the_ends_of_the_uniform_numbers_give_rows_and_finite_scales(device, norms):
    p = probabilities(norms.to(device))
    for name, k, u in product(UNBIASED, (1, 3, M), (0.0, 1 - 2**-53)):
        draw = ESTIMATORS[name](p, k, torch.full((k,), u, dtype=torch.float64, device=device))
        assert (draw.index >= 0).all() and (draw.index < M).all()
        assert draw.scale.isfinite().all() and (draw.scale >= 0).all()
        assert not draw.scale[p[draw.index] == 0].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_probabilities_sum_to_one_and_mix_the_prediction_with_the_norms(device, dtype):
    for norms in NORMS.values():
        p = probabilities(norms.to(device, dtype).clamp_max(torch.finfo(dtype).max), heavy(seed=1).to(device))
        assert p.dtype == torch.float64 and (p >= 0).all()
        assert float(p.sum()) == pytest.approx(1, abs=1e-14)
    norms, predicted = heavy().to(device, dtype), heavy(seed=1).to(device, dtype)
    product = norms.double() * predicted.double()
    expected = 0.9 * product / product.sum() + 0.1 * norms.double() / norms.double().sum()
    torch.testing.assert_close(probabilities(norms, predicted), expected)


@pytest.mark.parametrize("predicted", [0.0, -1.0, torch.inf, torch.nan, 1e308])
def test_a_useless_prediction_leaves_the_norms(device, predicted):
    norms = heavy().double().to(device)
    torch.testing.assert_close(probabilities(norms, torch.full_like(norms, predicted)), norms / norms.sum())


def test_what_is_not_allowed_is_not_drawn_and_all_zero_rows_evenly(device):
    allowed = torch.arange(M, device=device) < 8
    assert probabilities(torch.zeros(M, device=device), allowed=allowed).tolist() == [0.125] * 8 + [0.0] * 4
    p = probabilities(heavy().to(device), heavy(seed=1).to(device), allowed)
    assert not p[~allowed].any()
    torch.testing.assert_close(expected_weights("wta", p, 3), allowed.cpu().double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("odd", "scale"), [(torch.nan, 1.0), (torch.inf, 1e-30), (-torch.inf, 1e30)])
def test_rows_that_are_not_finite_are_drawn_always_and_others_have_finite_scales(device, scale, odd):
    norms = (heavy() * scale).to(device)
    norms[[3, 7]] = odd
    p = probabilities(norms, heavy(seed=1).to(device))
    for seed in range(50):
        u = torch.rand(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device)
        draw = wta(p, 5, u)
        assert {3, 7} <= set(draw.index.tolist())
        assert draw.scale.isfinite().all() and (draw.scale >= 1).all()
        assert (draw.scale * heavy().to(device)[draw.index]).max() <= 10 * heavy().sum()


@pytest.mark.parametrize(
    ("name", "norms", "k"), pairwise(UNBIASED, ["heavy", "ties", "zeros", "one", "tiny", "huge"], [1, 3, 8])
)
def test_no_row_is_scaled_up_beyond_the_bound(device, name, norms, k):
    norms = NORMS[norms].double().to(device)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        predicted = (8 * torch.randn(M, generator=generator)).exp().to(device)  # as wrong as can be
        u = torch.rand(k, generator=generator, dtype=torch.float64).to(device)
        index, scale = ESTIMATORS[name](probabilities(norms, predicted), k, u)
        scaled = (scale * norms[index])[scale > 1]
        assert (scaled <= 10 * norms.sum() / k * (1 + 1e-6)).all()


def pairs(seed):
    """Products of rows, flattened; and their norms."""
    x, y = random(M, 3, seed=seed).double(), random(M, 4, seed=seed + 100).double()
    products = torch.einsum("mi,mo->mio", x * heavy(seed=seed).double()[:, None], y).flatten(1)
    return products, products.norm(dim=1)


def independent(p, k, products):
    """Eq. 6's own variance, with k - c independent draws."""
    c = best_count(p, k)
    order = p.argsort(descending=True)[c:]
    mass = float(tails(p)[c])
    second = mass * (products[order].square().sum(1) / p[order]).sum()
    return float((second - products[order].sum(0).square().sum()) / (k - c))


@pytest.mark.parametrize(("is_right", "seed", "k"), pairwise([True, False], range(4), [1, 2, 4, 8, M - 1]))
def test_stratified_draws_vary_no_more_than_independent_ones(seed, k, is_right):
    products, norms = pairs(seed)
    p = probabilities(norms if is_right else heavy(seed=seed + 50))
    assert variance("wta", p, k, products) <= independent(p, k, products) * (1 + 1e-5)


@pytest.mark.parametrize(("seed", "k"), [(0, 4), (1, 6), (2, 8), (3, 4)])
def test_wta_varies_less_than_crs_and_uniform_draws_where_equation_7_holds(seed, k):
    products, norms = pairs(seed)
    p = probabilities(norms)
    c = best_count(p, k)
    assert c > 0 and 1 - float(tails(p)[c]) > c / k, "Eq. 7 does not hold"
    of_crs = variance("crs", p, k, products)
    assert variance("wta", p, k, products) < of_crs < variance("crs", probabilities(torch.ones(M)), k, products)
    independent = ((products.square().sum(1) / p).sum() - products.sum(0).square().sum()) / k
    assert of_crs == pytest.approx(float(independent), rel=1e-5)
