"""``norm="output"``: stock's forward, and gradients from the output that are at most twice as wrong as stock's."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_memsave import MemSaveConfig
from hf_memsave.errors import KeptTensorChangedError
from hf_memsave.ops.approximate.output_norm import is_well, layer_normed, output_norm, rms_normed
from support import helpers
from support import output_norms as norms
from support.pairs import pairwise

#: How much of dy is x̂: see the op's docstring on what lies beyond.
CORRELATIONS = (0.0, 0.5, 0.7)
#: Kinds, and how large β is beside γ.
RATIOS = [*(("layer_norm", ratio) for ratio in (0, 0.5, 1, 10, 100)), ("rms_norm", 0), ("t5_layer_norm", 0)]
GAMMAS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 0.0, "mixed")


@pytest.fixture(params=norms.KINDS)
def kind(request):
    return request.param


@pytest.mark.parametrize(("of", "dtype", "gamma"), pairwise(RATIOS, norms.DTYPES, GAMMAS))
def test_output_norm_is_at_most_twice_as_wrong_as_stock(device, of, dtype, gamma):
    """And, where γ is near 1, of halves at most twice as wrong as rounding: on CPU stock's own error is larger."""
    kind, ratio = of
    x = helpers.random(64, 768, dtype=dtype, device=device)
    for dy in (norms.incoming(kind, x, c) for c in CORRELATIONS):
        norms.assert_at_most_twice_as_wrong(
            kind, norms.module_of(kind, *norms.vectors(ratio, gamma, 768, dtype, device)), x, dy
        )
        if dtype in norms.HALVES and ratio <= 1:
            module = norms.module_of(kind, *norms.vectors(ratio, 1.0, 768, dtype, device))
            truth = norms.truth_of(kind, module, x, dy)
            _, got = norms.gradients(module, norms.from_output(module), x, dy)
            of_rounding = norms.errors([t.to(dtype) for t in truth], truth)
            assert all(mine <= 2 * floor for mine, floor in zip(norms.errors(got, truth), of_rounding, strict=True))


@pytest.mark.parametrize(("kind", "keeps", "dtype"), pairwise(norms.KINDS, [0, 2, 16], norms.DTYPES))
def test_output_norm_keeps_z_and_a_number_a_row_and_its_vectors(device, kind, dtype, keeps):
    helpers.only_on_cpu(device, "the size of stock's statistics")
    module, rows = norms.plain(kind, device, dtype, keeps=keeps), 15
    x = helpers.random(3, 5, 16, dtype=dtype, device=device)
    vectors = sum(p.nbytes for p in module.parameters())  # once more, by which the next linear makes y again
    assert helpers.kept(norms.from_output(module), x, tape=True) == helpers.nbytes(x) + 4 * rows + vectors
    assert helpers.kept(norms.from_output(module), x, tape=True, linear=False) == helpers.nbytes(x) + 4 * rows
    if kind == "layer_norm":
        assert helpers.kept(module, x, tape=False) == 2 * helpers.nbytes(x) + 2 * rows * x.itemsize


def assert_near(module, see, x, **options):
    """Stock's output, and gradients that are near, of what ``see`` makes of x."""
    got = helpers.run(lambda x: norms.from_output(module)(see(x)), [x], tape=True, **options)
    stock = helpers.run(lambda x: module(see(x)), [x], **options)
    helpers.assert_same_bits(got.output, stock.output)
    assert helpers.layout(got.output) == helpers.layout(stock.output)
    torch.testing.assert_close(got.of_inputs, stock.of_inputs)


def test_output_norm_takes_odd_shapes_views_frozen_parameters_and_autocast(device, kind):
    module, x = norms.plain(kind, device, keeps=2), helpers.random(3, 16, device=device)
    for shape in ((16,), (0, 16), (2, 0, 16), (2, 3, 1, 16)):
        assert_near(module, torch.clone, helpers.random(*shape, device=device))
    for view in helpers.LAYOUTS.values():
        width = view(helpers.random(4, 6, 16)).shape[-1]
        assert_near(norms.plain(kind, device, width=width, keeps=1), view, helpers.random(4, 6, 16, device=device))
    assert_near(norms.plain(kind, device), torch.clone, x, autocast=torch.bfloat16)
    assert_near(norms.plain(kind, device).requires_grad_(False), torch.clone, x)
    with torch.no_grad():
        helpers.assert_same_bits(norms.from_output(module.eval())(x), module(x))
    for shape, bias in (((5, 8), True), ((5, 8), False), ((8,), False)) if kind == "layer_norm" else ():
        module, x = nn.LayerNorm(shape, 1e-3, bias=bias, device=device), helpers.random(3, 5, 8, device=device)
        got, stock = (norms.gradients(module, f, x, x.cos()) for f in (norms.from_output(module), module))
        helpers.assert_same_bits(got[0], stock[0])
        torch.testing.assert_close(got[1], stock[1])


@pytest.mark.parametrize("columns", [[], [0, 2], [0, 1, 2, 3]], ids=str)
def test_output_norm_has_the_right_gradients(device, monkeypatch, columns):
    # RMSNorm computes in fp32, too coarse for finite differences: in this test "fp32" is float64.
    monkeypatch.setattr(torch, "float32", torch.float64)
    x, weight, bias = (
        helpers.random(*s, dtype=torch.float64, device=device, seed=i) for i, s in enumerate([(3, 4), (4,), (4,)])
    )
    weight, bias = weight.sign() + 0.1 * weight, 0.1 * bias
    large, none = bias.clone(), weight.clone()
    large[columns], none[columns] = 10.0, 0.0
    helpers.assert_gradients_are_right(
        lambda *args: output_norm(layer_normed, *args, norms.EPS), x, weight, large, twice=False
    )
    helpers.assert_gradients_are_right(
        lambda *args: output_norm(rms_normed, *args, None, norms.EPS), x, none, twice=False
    )


@pytest.mark.parametrize(("name", "tape"), [("weight", True), ("bias", True), ("bias", False)])
def test_output_norm_raises_where_a_parameter_was_changed(device, name, tape):
    module, x = norms.plain("layer_norm", device), helpers.random(3, 16, device=device).requires_grad_()
    with helpers.taping() if tape else contextlib.nullcontext():
        y = output_norm(layer_normed, x, module.weight, module.bias, norms.EPS)
    with torch.no_grad():
        getattr(module, name).add_(1)
    with pytest.raises(KeptTensorChangedError if tape else RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_output_norm_runs_backward_twice_and_in_checkpoints_but_not_through_itself(device, kind):
    norm, x = norms.from_output(norms.plain(kind, device, keeps=2)), helpers.random(3, 16, device=device)
    helpers.assert_backward_twice(norm, x)

    def block(x):
        with helpers.taping() if torch.is_grad_enabled() else contextlib.nullcontext():
            return norm(x).square()

    for use_reentrant in (True, False):
        again = helpers.run(lambda x: checkpoint(block, x, use_reentrant=use_reentrant), [x])  # noqa: B023
        helpers.assert_same_result(again, helpers.run(block, [x]))
    leaf = x.requires_grad_()
    with helpers.taping():
        y = norm(leaf)
    (dx,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_output_norm_tells_columns_apart(device):
    module = norms.plain("layer_norm", device, keeps=2)
    module.bias.data[:2] = 1000
    x = helpers.random(64, 16, device=device)
    norms.assert_at_most_twice_as_wrong("layer_norm", module, x, norms.incoming("layer_norm", x, 0.5))


def seen(fn, x):
    """The output, as a product after it has it in backward."""
    with helpers.taping():
        y = fn(x.detach().clone().requires_grad_())
        factor = torch.ones_like(y).requires_grad_()
        product = y * factor
    return torch.autograd.grad(product.sum(), factor)[0]


@pytest.mark.parametrize("dtype", [*norms.DTYPES, torch.float64])
def test_what_follows_output_norm_sees_y_in_backward(device, kind, dtype):
    """Its bits; of a LayerNorm of halves in the columns that keep x̂, at most 1.4 times as far from the truth."""
    helpers.only_on_cpu(device)
    module, x = norms.plain(kind, device, dtype, width=64, keeps=16), helpers.random(64, 64, dtype=dtype, device=device)
    if kind == "layer_norm":
        module.bias.data[:8] = 1.01  # of γ = 1: that nearest to what is told from y
    got, stock = (seen(f, x) for f in (norms.from_output(module), module))
    helpers.assert_same_bits(got[:, 16:], stock[:, 16:])
    if kind != "layer_norm" or dtype not in norms.HALVES:
        helpers.assert_same_bits(got, stock)
    else:
        assert ((got - stock).abs().double() <= torch.finfo(dtype).eps * (stock.abs() + module.bias.abs())).all()
        truth = norms.true_norm(kind, x.double(), module.weight.double(), module.bias.double())
        for columns in (slice(8), slice(8, 16)):
            mine, theirs = ((y - truth)[:, columns].norm() for y in (got, stock))
            assert mine <= 1.4 * theirs


def test_output_norm_finds_the_columns_in_need():
    tiny = torch.finfo(torch.float16).tiny
    weight = torch.tensor([1, -1, 1, -1, 0, 4 * tiny, 8 * tiny, float("nan"), 1], dtype=torch.float16)
    bias = torch.tensor([1, -1, 1.01, -1.01, 0, 0, 0, 0, float("nan")], dtype=torch.float16)
    assert is_well(weight, bias).logical_not().nonzero().flatten().tolist() == [2, 3, 4, 5, 7, 8]
    assert is_well(weight, None).logical_not().nonzero().flatten().tolist() == [4, 5, 7]


def test_what_follows_makes_y_again_where_its_vectors_are_freed(device, kind):
    """As FSDP2 frees them after the forward, and has them again for the norm's own backward."""
    module, x = norms.plain(kind, device, keeps=2), helpers.random(12, 16, device=device)
    after = nn.Linear(16, 2).to(device)
    whole = {p: p.detach().clone() for p in module.parameters()}

    def gather(gradient):
        for p, values in whole.items():
            p.untyped_storage().resize_(values.nbytes)
            p.data.copy_(values)

    def step(frees):
        leaf = x.clone().requires_grad_()
        with helpers.taping():
            y = norms.from_output(module)(leaf)
            loss = after(y).square().sum()
        y.register_hook(gather)
        for p in whole if frees else ():
            p.untyped_storage().resize_(0)
        return torch.autograd.grad(loss, [leaf, *module.parameters(), *after.parameters()])

    for freed, there in zip(step(True), step(False), strict=True):
        helpers.assert_same_bits(freed, there)


def assert_is_exact(module, x, autocast=None, tape=True, **options):
    norm = norms.from_output(module, **options)
    helpers.assert_same_result(
        helpers.run(norm, [x], tape=tape, autocast=autocast), helpers.run(module, [x], autocast=autocast)
    )
    assert helpers.kept(norm, x, tape, autocast=autocast) == helpers.kept(module, x, tape, autocast=autocast)


@pytest.mark.parametrize("why", ["dtype", "autocast", "alone", "no tape"])
def test_output_norm_recomputes_where_its_output_would_not_do(device, kind, why):
    """Where what follows would keep y beside z, it keeps what stock does."""
    helpers.only_on_cpu(device)
    half = torch.bfloat16
    module = norms.plain(kind, device, half if why == "autocast" else torch.float32, keeps=2)
    x = helpers.random(3, 16, dtype=half if why in ("dtype", "autocast") else torch.float32, device=device)
    if why == "dtype" and kind != "layer_norm":
        pytest.skip("does not apply: its output is of the wider dtype")
    alone = {"config": MemSaveConfig(norm="output")} if why == "alone" else {}
    assert_is_exact(module, x, half if why == "autocast" else None, tape=why != "no tape", **alone)


@pytest.mark.parametrize(
    ("dtype", "share"), [*((dtype, 1) for dtype in norms.DTYPES), (torch.float16, 0.4), (torch.bfloat16, 1e-3)]
)
def test_output_norm_is_finite_where_its_output_is_not(device, kind, dtype, share):
    """γ is so large that γ x̂ overflows, and what follows is bounded."""
    module = norms.plain(kind, device, dtype)
    module.weight.data[:2] = share * torch.finfo(dtype).max
    x = helpers.random(8, 16, dtype=dtype, device=device)
    y, got = norms.gradients(module, lambda x: torch.tanh(norms.from_output(module)(x)), x, torch.ones_like(x))
    assert y.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in got)


def test_output_norm_is_stock_where_its_input_is_kept_anyway(device, kind):
    module, x = norms.plain(kind, device).requires_grad_(False), helpers.random(3, 5, 16, device=device)
    options, both = dict(tape=True, linear=False), (norms.from_output(module), module)
    mine, exact = (helpers.kept(lambda x: f(x.tanh()), x, **options) for f in both)  # noqa: B023
    assert mine == exact
    got, stock = (helpers.run(lambda x: f(x.tanh()), [x], tape=True) for f in both)  # noqa: B023
    helpers.assert_same_result(got, stock)
