"""Sampled pairs: as the formulas say, unbiased, the same twice, and 1% of an error is seen."""

import pytest
import torch

import memsave_kernels as k
from cases.case import DEVICE
from interpreter import only_interpreted, watching

ROWS, M, DRAWN = 3, 37, 11


def some(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def expected_probabilities(norms, predicted, allowed):
    a = norms.double()
    a = a if allowed is None else a * allowed
    p = a / a.sum(-1, keepdim=True)
    if predicted is not None:
        product = a * predicted.double().clamp_min(0)
        p = 0.9 * product / product.sum(-1, keepdim=True) + 0.1 * p
    return p


@pytest.mark.parametrize("is_predicted", [False, True])
@pytest.mark.parametrize("is_allowed", [False, True])
@pytest.mark.parametrize("m", [M, 1500])
def test_probabilities(m, is_allowed, is_predicted):
    predicted = some(ROWS, m, seed=1) - 0.2 if is_predicted else None
    allowed = some(m, seed=2) > 0.3 if is_allowed else None
    norms = some(ROWS, m)
    found = k.probabilities(norms, predicted, allowed)
    torch.testing.assert_close(found, expected_probabilities(norms, predicted, allowed), rtol=1e-12, atol=0)


def test_odd_norms():
    norms = torch.zeros(4, 8, device=DEVICE)
    norms[1, 3], norms[2, 5] = float("nan"), float("inf")
    norms[3] = 1.0
    allowed = torch.ones(8, dtype=torch.bool, device=DEVICE)
    allowed[7] = False
    p = k.probabilities(norms, torch.zeros_like(norms), allowed)
    assert torch.allclose(p.sum(-1), torch.ones(4, dtype=torch.float64, device=DEVICE))
    assert torch.allclose(p[0, :7], p.new_full((7,), 1 / 7)) and (p[[0, 3], 7] == 0).all()
    assert p[1, 3] > 0.999 and p[2, 5] > 0.999


def expected_draw(p, count, u, estimator):
    """One row, in the words of the formulas."""
    values, order = p.sort(descending=True, stable=True)
    tails = [values[j:].sum().item() for j in range(len(p))] + [0.0]
    c = min(range(count), key=lambda j: tails[j] / (count - j)) if estimator == "wta" else 0
    index, scale = [order[j].item() for j in range(c)], [1.0] * c
    for slot in range(c, count):
        part = (slot - c + 1 - u[slot].item()) / (count - c) if estimator == "wta" else 1 - u[slot].item()
        j = max(i for i in range(len(p)) if tails[i] >= tails[c] * part)
        index.append(order[j].item())
        scale.append(tails[c] / ((count - c) * values[j].item()))
    return index, scale


@pytest.mark.parametrize("estimator", ["wta", "crs"])
@pytest.mark.parametrize("m", [M, 1100])
def test_draw(m, estimator):
    p = k.probabilities(some(ROWS, m) ** 6)
    u = some(ROWS, DRAWN, seed=3)
    index, scale = k.draw(p, DRAWN, u, estimator)
    for row in range(ROWS):
        expected = expected_draw(p[row].cpu(), DRAWN, u[row].cpu(), estimator)
        assert index[row].tolist() == expected[0]
        torch.testing.assert_close(scale[row].cpu(), torch.tensor(expected[1]), rtol=1e-5, atol=0)
    assert estimator == "crs" or m > M or ((scale == 1).sum(-1) > 0).all()  # p**6 has winners


@pytest.mark.parametrize("estimator", ["wta", "crs"])
def test_the_expected_weight_of_each_pair_is_1(estimator):
    p = k.probabilities(some(1, 9) + 0.1).expand(128, 9).contiguous()
    index, scale = k.draw(p, 4, some(128, 4, seed=5), estimator)
    weights = torch.zeros(128, 9, dtype=torch.float64, device=DEVICE).scatter_add_(1, index, scale.double())
    error = weights.mean(0) - 1
    assert (error.abs() < 5 * weights.std(0) / 128**0.5 + 1e-6).all()


def test_all_of_them_and_one():
    p = k.probabilities(some(2, M))
    index, scale = k.draw(p, M, some(2, M))
    assert (index.sort(-1).values == torch.arange(M, device=DEVICE)).float().mean() > 0.5 and scale.isfinite().all()
    index, scale = k.draw(p, 1, some(2, 1))
    torch.testing.assert_close(scale, (1 / p.gather(1, index)).float())


@only_interpreted
def test_the_same_twice_and_a_spoilt_store_is_seen():
    def run():
        p = k.probabilities(some(ROWS, M), some(ROWS, M, seed=1))
        return p, *k.draw(p, DRAWN, some(ROWS, DRAWN, seed=3))

    expected = run()
    with watching() as watch:
        assert all(torch.equal(a, b) for a, b in zip(run(), expected, strict=True))
    stores = {(one.kernel, name) for one in watch.launches for name, n in one.written.items() if n}
    assert len(stores) == 5
    for store in stores - {("tails_kernel", "tail_ptr")}:  # a factor common to all T cancels
        with watching(spoil=store):
            assert any(not torch.equal(a, b) for a, b in zip(run(), expected, strict=True)), store


def test_refuses():
    p = k.probabilities(some(1, 4))
    for how in (("topk", 2), ("wta", 5), ("wta", 0)):
        with pytest.raises(ValueError, match="expected 'wta' or 'crs' and k from 1 to 4"):
            k.draw(p, how[1], some(1, max(1, how[1])), how[0])


def test_schemas_and_fakes():
    p, u = k.probabilities(some(2, 8)), some(2, 3)
    ops = getattr(torch.ops, k.NAMESPACE)
    for op, args in ((ops.draw, (p, 3, u, True)), (ops.probabilities, (some(2, 8), some(2, 8), None))):
        torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))
