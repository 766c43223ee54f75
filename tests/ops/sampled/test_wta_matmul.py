"""``wta_matmul``: stock's bits forward, and unbiased gradients of both operands."""

from functools import partial

import pytest
import torch
from torch import nn

from hf_memsave import WTACRS, MemSaveConfig, PatchError, patch
from hf_memsave.ops.sampled import eager_attention
from hf_memsave.ops.sampled.sampler import Layer, Sampler
from hf_memsave.ops.sampled.wta_crs import LAYER
from hf_memsave.ops.sampled.wta_matmul import wta_matmul
from support.draws import standard_errors
from support.eager import attentions, eager, ops_of
from support.helpers import assert_same_bits, kept, nbytes, random, taping
from support.steps import assert_same, patched, state_of, step
from support.zoo import batch_for

LOW = torch.bfloat16
BATCH, HEADS = 200, 100  # each head of each sequence draws for itself: 20,000 independent draws in one call
N, M, Q = 11, 6, 9
SMALL = WTACRS(budget=0.4, minimum=1, attention=True)


def sampling(config=SMALL):
    """``wta_matmul`` as a function of A and B, for a new step of a new sampler in each call."""
    sampler = Sampler(config)

    def product(a, b):
        with sampler.entering({}, None):
            return wta_matmul(a, b, Layer("attention", sampler), "product 1")

    return product


def operands(*leading, dtype=torch.float32, device="cpu"):
    """A ``[*, n, m]`` and B ``[*, m, q]`` whose rows and columns differ in norm, and the incoming gradient."""
    given = []
    for seed, shape in enumerate([(N, M), (M, Q), (N, Q)]):
        x = random(*shape, dtype=torch.float64, device=device, seed=seed)
        x = x * torch.linspace(0.5, 1.5, shape[0])[:, None].to(x) * torch.linspace(1.5, 0.5, shape[1]).to(x)
        given.append(x.to(dtype).expand(*leading, *shape).contiguous())
    return given


def gradients(product, a, b, dc):
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    return torch.autograd.grad(product(a, b), (a, b), dc)


def in_errors(config, dtype, device):
    """Of dA and dB, over 20,000 draws: near 1 or below where there is no bias."""
    a, b, dc = operands(BATCH, HEADS, dtype=dtype, device=device)
    found = gradients(sampling(config), a, b, dc)
    a, b, dc = (x[0, 0].double() for x in (a, b, dc))
    return [standard_errors(x.flatten(0, -3), truth) for x, truth in zip(found, (dc @ b.mT, a.mT @ dc), strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_forward_has_the_bits_of_stock(device, dtype):
    a, b, _ = operands(2, 3, dtype=dtype, device=device)
    with taping():
        got = sampling()(a.requires_grad_(), b.requires_grad_())
    assert "Sampled" in type(got.grad_fn).__name__
    assert_same_bits(got, torch.matmul(a, b))


@pytest.mark.parametrize(("budget", "minimum"), [(1.0, 1), (0.1, max(N, Q)), (0.01, N - 1), (0.01, Q - 1)])
def test_a_dimension_no_longer_than_its_draw_is_exact(device, budget, minimum):
    given = operands(2, 3, dtype=torch.float64, device=device)
    found, exact = (gradients(p, *given) for p in (sampling(WTACRS(budget=budget, minimum=minimum)), torch.matmul))
    for got, expected, length in zip(found, exact, (Q, N), strict=True):
        if max(round(budget * length), minimum) >= length:
            assert_same_bits(got, expected)
        else:
            assert not torch.allclose(got, expected)


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_only_what_is_wanted_is_drawn(device, wanted):
    a, b, dc = operands(2, 3, device=device)
    both = gradients(sampling(), a, b, dc)
    leaves = [x.clone().requires_grad_(w) for x, w in zip((a, b), wanted, strict=True)]
    sampling()(*leaves).backward(dc)
    for leaf, expected, is_wanted in zip(leaves, both, wanted, strict=True):
        assert_same_bits(leaf.grad, expected if is_wanted else None)


@pytest.mark.parametrize(("estimator", "dtype"), [("wta", torch.float32), ("wta", LOW), ("crs", torch.float32)])
def test_both_gradients_are_unbiased(device, dtype, estimator):
    config = WTACRS(budget=0.4, minimum=1, estimator=estimator)
    assert max(in_errors(config, dtype, device)) < 2


def test_draws_are_independent_between_heads_operands_and_products(device):
    a, b, dc = operands(50, 40, device=device)
    da, _ = gradients(sampling(), a, b, dc)
    (same, _), sampler = gradients(sampling(), a, b, dc), Sampler(SMALL)
    with sampler.entering({}, None):
        other, _ = gradients(lambda a, b: wta_matmul(a, b, Layer("attention", sampler), "product 2"), a, b, dc)
    assert_same_bits(same, da)
    assert len(da.flatten(0, 1).flatten(1).unique(dim=0)) > 20
    errors = [(x - x.mean((0, 1))).flatten() for x in (da, other)]
    assert abs(torch.corrcoef(torch.stack(errors))[0, 1]) < 0.1
    ones = torch.ones(8, 5, 16, 16, device=device)  # evenly drawn; of dC = 1, what is not zero was drawn
    da, db = gradients(sampling(), ones, ones, torch.eye(16, device=device).expand_as(ones))
    assert not torch.equal(da.any(-1), db.any(-2))


@pytest.mark.parametrize(("operand", "bad"), [(0, float("nan")), (1, float("inf"))])
def test_what_is_not_finite_is_passed_on(device, operand, bad):
    given = operands(2, 3, device=device)
    given[operand][1, 2, 3, 4] = bad
    found = gradients(sampling(), *given)[1 - operand]
    assert not found[1, 2].isfinite().all()
    assert found[0].isfinite().all()


def test_it_refuses_to_be_differentiated_twice_and_is_exact_without_a_batch(device):
    a, b, dc = operands(2, 3, device=device)
    alone = partial(wta_matmul, layer=Layer("attention", Sampler(SMALL)), name="product 1")
    for got, expected in zip(gradients(alone, a, b, dc), gradients(torch.matmul, a, b, dc), strict=True):
        assert_same_bits(got, expected)
    (da,) = torch.autograd.grad(sampling()(a.requires_grad_(), b.requires_grad_()).sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        da.sum().backward()


def test_it_keeps_drawn_rows_and_columns_or_indices_alone_for_what_is_kept_anyway(device):
    a, b, _ = operands(2, 3, device=device)
    b = b.requires_grad_()

    def call(product, before):
        return lambda x: product(before(x), torch.clone(b))

    options = dict(tape=True, linear=False)
    stock, here = (kept(call(p, torch.clone), a, **options) for p in (torch.matmul, sampling()))
    rows, columns, heads = round(0.4 * N), round(0.4 * Q), 2 * 3
    of_rows, of_columns = heads * rows * (M * 4 + 4), heads * columns * (M * 4 + 4)
    assert stock == nbytes(a, b)
    assert here == of_rows + of_columns
    stock, here = (kept(call(p, lambda x: torch.softmax(x, -1)), a, **options) for p in (torch.matmul, sampling()))
    assert stock - here == nbytes(b) - of_columns - heads * rows * 8


#: Only attention is sampled: the classifier's batch has no more rows than the fewest drawn.
CONFIG = MemSaveConfig(linear=WTACRS(budget=0.3, minimum=2, targets=("classifier",), attention=True))


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5-decoder"])
def test_sampled_attention_leaves_the_loss_alone_and_eval_exact_and_is_reported_and_undone(device, family):
    model = eager(family, device=device)
    batch, before = batch_for(model, padded=True), state_of(model)
    in_eval, expected = step(model.eval(), batch), step(model.train(), batch)
    report = patch(model, MemSaveConfig(linear=WTACRS(budget=0.1, minimum=2, attention=True)))
    assert all(LAYER in module.__dict__ for module in attentions(model))
    assert "eager_attention" in ops_of(report) and "and those of attention's products" in str(report)
    assert_same(step(model.eval(), batch), in_eval)
    got = step(model.train(), batch)
    assert_same({"loss": got["loss"]}, {"loss": expected["loss"]})
    assert got.keys() == expected.keys()
    assert all(value.isfinite().all() for value in got.values())
    report.undo()
    assert state_of(model) == before
    assert_same(step(model, batch), expected)


def test_each_product_of_an_attention_draws_under_a_name_of_its_own(device, monkeypatch):
    drawn = []

    def sampled(a, b, layer, name):
        drawn.append(name)
        return wta_matmul(a, b, layer, name)

    monkeypatch.setattr(eager_attention, "wta_matmul", sampled)
    model = patched(eager("bert", device=device), MemSaveConfig(linear=SMALL))
    step(model, batch_for(model))
    assert drawn == ["product 1", "product 2"] * 2


def test_sampled_attention_refuses_what_it_cannot_patch(device):
    linear, model = WTACRS(attention=True), eager("bert", device=device)
    for name in ("sdpa", "flash_attention_2"):
        model.config._attn_implementation_internal = name
        before = state_of(model)
        expected = f"expected attn_implementation='eager', got '{name}' in bert.*Load the model"
        with pytest.raises(PatchError, match=expected):
            patch(model, CONFIG)
        assert state_of(model) == before
    hidden = eager("bert", device=device)
    module = hidden.bert.encoder.layer[0].attention.self
    module.forward = partial(type(module).forward, module)
    with pytest.raises(PatchError, match="to patch bert.encoder.layer.0.attention.self, but its forward was set"):
        patch(hidden, MemSaveConfig(linear=linear))
    with pytest.raises(PatchError, match="got Sequential, which has none"):
        patch(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), MemSaveConfig(linear=linear))
