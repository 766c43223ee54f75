"""``few_bit`` keeps b bits an element for a step function, where nothing wants its output; else it is exact."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers.activations import NewGELUActivation, QuickGELUActivation

from hf_memsave import MemSaveConfig, measure_kept, patch
from hf_memsave.ops.approximate import few_bit as file
from hf_memsave.ops.approximate.few_bit import RANGE, FewBit, levels
from hf_memsave.ops.approximate.inverse import ACTIVATIONS
from hf_memsave.tape.bits import pack_bits, pack_codes, unpack_bits, unpack_codes
from support import helpers
from support.pairs import pairwise
from support.steps import assert_same, patched_copy, step
from support.zoo import Size, batch_for, build

BITS = range(1, 9)
MODULES = {
    "gelu": nn.GELU, "gelu-tanh": partial(nn.GELU, "tanh"), "silu": nn.SiLU, "new-gelu": NewGELUActivation,
    "quick-gelu": QuickGELUActivation,
}  # fmt: skip
#: Largest and L2 error on [-10, 10] of FewBit's own tables (1 to 4 bits), as InvAct's Fig. 5 has them.
PUBLISHED = {"gelu": (0.376, 0.211, 0.110, 0.064), "silu": (0.464, 0.242, 0.165, 0.073)}
SIZE = Size(hidden=64)
#: Of the expression of NewGELU: float64 numbers that autograd keeps for the exact op.
FACTORS = 3 * 8


def few_bit(module, bits=4):
    return helpers.swapped(module, "activation", FewBit(bits))


def code_bytes(x, bits=4):
    """In so many bits an element, and a byte for 1024."""
    return bits * -(-x.numel() // 8) + -(-x.numel() // 1024)


def kept_before_frozen(op, x):
    """Bytes that ``op`` keeps before a frozen linear, but for those of the loss."""
    linear = nn.Linear(x.shape[-1], 2, device=x.device, dtype=x.dtype).requires_grad_(False)
    return (
        measure_kept(helpers.Probe(op, True, torch.clone, linear, None), x.detach().requires_grad_()).total - x.itemsize
    )


def gradients(model, x, forward):
    leaf = x.detach().clone().requires_grad_()
    model.zero_grad()
    forward(model, leaf).square().sum().backward()
    return [leaf.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


def plainly(model, x):
    return model(x)


def in_a_tape(model, x):
    with helpers.taping():
        return model(x)


def assert_all_same(got, expected):
    for mine, theirs in zip(got, expected, strict=True):
        helpers.assert_same_bits(mine, theirs)


def of_level(x, bits):
    """The derivative of GELU that is kept of ``x``."""
    table = levels("gelu", bits)
    pieces = np.searchsorted(table.boundaries, x.detach().float().cpu().numpy(), side="right")
    return torch.as_tensor(table.levels[pieces], device=x.device)


@pytest.mark.parametrize(("bits", "dtype", "shape"), pairwise(BITS, helpers.DTYPES, [(501,), (0, 4), (3, 5)]))
def test_few_bit_backward_is_the_level_of_the_input(device, dtype, bits, shape):
    x, op = (helpers.random(*shape, dtype=dtype, device=device) * 4).requires_grad_(), few_bit(nn.GELU(), bits)
    dy = helpers.random(*shape, dtype=dtype, device=device, seed=3)
    in_a_tape(op, x).backward(dy)
    helpers.assert_same_bits(x.grad, (dy * of_level(x, bits)).to(dtype))
    assert helpers.kept(op, x.detach(), tape=True, linear=False) <= code_bytes(x, bits)


@pytest.mark.parametrize("view", helpers.LAYOUTS)
def test_few_bit_takes_views(device, view):
    """And keeps no more than the exact op and its bits, where these take less than the whole that a part lies in."""
    x, see = helpers.random(4, 5, 8, device=device).requires_grad_(), helpers.LAYOUTS[view]
    seen = see(x)
    dy = helpers.random(*seen.shape, device=device, seed=3)
    found = in_a_tape(lambda x: few_bit(nn.GELU())(see(x)), x)
    helpers.assert_same_bits(
        *(torch.autograd.grad(y, x, d)[0] for y, d in ((found, dy), (seen, dy * of_level(seen, 4))))
    )
    mine, exact = (
        helpers.kept(lambda x: op(see(x)), x.detach(), tape=True, producer=torch.ops.aten.clone)  # noqa: B023
        for op in (few_bit(nn.GELU()), nn.functional.gelu)
    )
    assert mine <= exact + code_bytes(seen)


def test_few_bit_runs_backward_twice_but_not_double(device):
    helpers.assert_backward_twice(few_bit(nn.SiLU()), helpers.random(3, 8, device=device))
    x = helpers.random(3, 8, device=device).requires_grad_()
    (dx,) = torch.autograd.grad(in_a_tape(few_bit(nn.SiLU()), x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def l2(name, table):
    """The root of the integral of the squared error on [-10, 10]."""
    edges = torch.linspace(-RANGE, RANGE, 200_001, dtype=torch.float64)
    slopes = (ACTIVATIONS[name](edges).diff() / edges.diff()).numpy()
    middles = ((edges[1:] + edges[:-1]) / 2).numpy()
    found = table.levels[np.searchsorted(table.boundaries, middles, side="right")]
    return float(np.sqrt(np.mean((found - slopes) ** 2) * 2 * RANGE))


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "quick_gelu"])  # new_gelu is gelu_tanh
def test_levels_halve_the_error_with_each_bit_and_are_no_worse_than_published(name):
    errors = [l2(name, levels(name, bits)) for bits in BITS]
    assert all(after < 0.62 * before for before, after in zip(errors, errors[1:], strict=False))
    assert errors[7] < 0.005
    assert all(error < published * 1.002 for error, published in zip(errors, PUBLISHED.get(name, ()), strict=False))


@pytest.mark.parametrize(("name", "bits"), [("gelu", 2), ("silu", 3), ("gelu", 1)])
def test_levels_are_the_best_nearby(name, bits):
    table = levels(name, bits)
    best = l2(name, table)
    assert np.all(np.diff(table.boundaries) > 0)
    for array in table:
        for i, value in enumerate(array.copy()):
            for change in (-0.05, 0.05):
                array[i] = value + change
                assert l2(name, table) > best
                array[i] = value


@pytest.mark.parametrize("bits", BITS)
def test_codes_come_back(device, bits):
    for shape in ((), (1,), (8,), (3, 5), (0,), (2, 0, 3)):
        codes = torch.randint(2**bits, shape, dtype=torch.uint8, device=device)
        packed = pack_codes(codes, bits)
        assert packed.nbytes == bits * -(-codes.numel() // 8)
        assert torch.equal(unpack_codes(packed, codes.numel()).view(shape), codes)
    flags = helpers.random(1001, device=device) > 0
    packed = pack_bits(flags)
    assert packed.nbytes == 126
    assert torch.equal(unpack_bits(packed, 1001), flags)


@pytest.mark.parametrize(
    ("kind", "dtype", "shape", "autocast"),
    pairwise(MODULES, helpers.DTYPES, [(7, 5, 9), (), (3,), (0, 4), (2, 1, 7)], [None, torch.bfloat16]),
)
def test_few_bit_is_exact_where_its_output_is_wanted(device, kind, dtype, shape, autocast):
    helpers.only_on_cpu(device)
    op, stock, x = few_bit(MODULES[kind]()), MODULES[kind](), helpers.random(*shape, dtype=dtype, device=device)
    helpers.assert_exact(op, stock, [x], autocast=autocast)
    if len(shape) == 3:
        helpers.assert_exact(lambda x: op(x.transpose(0, 1)), lambda x: stock(x.transpose(0, 1)), [x])


def test_few_bit_goes_back_under_the_autocast_of_its_forward(device):
    helpers.only_on_cpu(device)

    def rounded(x):  # an activation in which autocast converts
        return torch.nn.functional.gelu(x @ torch.eye(8, device=device)).float()

    op = partial(file.few_bit, name="gelu", forward=rounded)
    helpers.assert_exact(op, rounded, [helpers.random(3, 8, device=device)], autocast=torch.bfloat16)


@pytest.mark.parametrize(("kind", "bits", "dtype"), pairwise(MODULES, BITS, helpers.DTYPES))
def test_few_bit_keeps_what_the_exact_op_does_before_a_trained_linear_and_bits_before_a_frozen_one(
    device, kind, bits, dtype
):
    op, x = few_bit(MODULES[kind](), bits), helpers.random(3, 16, 8, dtype=dtype, device=device)
    assert helpers.kept(op, x, tape=True) == helpers.nbytes(x)
    assert kept_before_frozen(op, x) == code_bytes(x, bits) == x.numel() * bits // 8 + 1
    assert helpers.kept(op, x, tape=True, producer=torch.sigmoid) == helpers.nbytes(x), "its input is kept anyway"


def block(act, trained):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), act, nn.Linear(16, 8))
    model[2].requires_grad_(trained)
    return model


@pytest.mark.parametrize(("use_reentrant", "trained"), [(True, True), (False, True), (False, False)])
def test_few_bit_chooses_in_a_checkpointed_block(device, use_reentrant, trained):
    x = helpers.random(64, 8, device=device)
    again = partial(checkpoint, in_a_tape, use_reentrant=use_reentrant)
    expected = gradients(block(nn.GELU() if trained else few_bit(nn.GELU()), trained).to(device), x, in_a_tape)
    assert_all_same(gradients(block(few_bit(nn.GELU()), trained).to(device), x, again), expected)


def test_few_bit_keeps_its_bits_where_a_foreign_hook_lies_before_the_consumer(device):
    model, x = block(few_bit(nn.GELU()), True).to(device), helpers.random(64, 8, device=device).requires_grad_()
    seen = []
    with helpers.taping():
        y = model[1](model[0](x))
        with saved_tensors_hooks(lambda t: (seen.append(t.shape), t)[1], lambda t: t):
            z = model[2](y)
    z.sum().backward()
    assert y.shape in seen
    with torch.no_grad():
        middle = model[0](x)
    (slopes,) = torch.autograd.grad(file.few_bit(middle.requires_grad_(), "gelu", nn.GELU()).sum(), middle)
    dy = torch.ones(len(x), model[2].out_features) @ model[2].weight
    helpers.assert_same_bits(x.grad, (dy * slopes).detach() @ model[0].weight.detach())


def test_an_output_that_its_user_holds_is_not_taken_and_one_that_was_written_to_is_kept_beside_the_bits(device):
    held, op, x = [], few_bit(nn.GELU()), helpers.random(3, 16, 8, device=device)

    def hold(x):
        y = op(x)
        held.append(y.detach())
        return y

    assert kept_before_frozen(hold, x) == helpers.nbytes(x) + code_bytes(x)
    assert helpers.kept(lambda x: op(x).neg_(), x, tape=True) == helpers.nbytes(x) + code_bytes(x)


def test_an_input_that_was_written_to_is_not_promised_from(device):
    op, x, slope = few_bit(nn.GELU()), helpers.random(64, device=device), []
    for change in (False, True):
        leaf, weight = x.clone().requires_grad_(), torch.ones(64, device=device, requires_grad=True)
        with helpers.taping():
            z = leaf * 1
            y = op(z)
            if change:
                with torch.no_grad():
                    z.zero_()
            product = y * weight
        product.sum().backward()
        helpers.assert_same_bits(weight.grad, nn.GELU()(x))
        slope.append(leaf.grad)
    assert 0 < (slope[0] - slope[1]).abs().max() < 0.1  # of the bits, of the input as it was


@pytest.mark.parametrize("trained", [0, 1])
def test_each_activation_of_a_model_chooses_for_itself_and_the_report_counts_what_it_frees(device, trained):
    """Of two, the linear after the first is trained or not, that after the second the other way."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)]
    stock = nn.Sequential(*layers, nn.Linear(8, 2)).to(device)
    stock[2].requires_grad_(trained == 0)
    stock[5].requires_grad_(trained == 1)
    exact, ours = patched_copy(stock), copy.deepcopy(stock)
    report = patch(ours, MemSaveConfig(activation="few_bit"))
    x, n = helpers.random(64, 8, device=device).requires_grad_(), 64 * 16
    for model in (stock, ours):
        gradients(model, x, plainly)
    after, before = (ours[3].weight.grad, stock[3].weight.grad) if trained else (None, None)
    helpers.assert_same_bits(after, before)  # of what lies behind the activation that keeps bits
    assert not torch.equal(ours[0].weight.grad, stock[0].weight.grad)
    of_stock, of_exact, of_ours = (measure_kept(model, x).total for model in (stock, exact, ours))
    assert of_exact - of_ours == n * 4 - (n // 2 + n // 1024)  # one of both, in 4 bits and a byte
    assert report.step.nbytes_avoided == of_stock - of_ours >= n * 7


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5-gated-encoder"])
def test_a_model_that_is_trained_whole_gets_the_exact_config(device, family):
    helpers.only_on_cpu(device)
    exact = build(family, SIZE).to(device)
    ours, stock = copy.deepcopy(exact), copy.deepcopy(exact)
    patch(exact)
    patch(ours, MemSaveConfig(activation="few_bit"))
    batch = batch_for(stock, SIZE)
    factors = measure_kept(exact, batch).total - measure_kept(ours, batch).total
    assert factors == FACTORS * {"gpt2": 2, "t5-gated-encoder": 4}.get(family, 0)
    assert_same(step(ours, batch), step(stock, batch))


@pytest.mark.parametrize(
    ("norm", "trained", "storage"), pairwise([nn.LayerNorm, nn.BatchNorm1d], [True, False], [None, "int8"])
)
def test_few_bit_keeps_no_more_than_the_exact_op_after_a_norm(device, norm, trained, storage):
    """The norm keeps what the activation's input is promised from."""
    stock = nn.Sequential(nn.Linear(64, 64), norm(64), nn.GELU(), nn.Linear(64, 64)).to(device)
    stock[-1].requires_grad_(trained)
    x, models = helpers.random(32, 64, device=device), {}
    for value in ("recompute", "few_bit"):
        models[value] = copy.deepcopy(stock)
        patch(models[value], MemSaveConfig(activation=value, storage=storage))
    exact, chosen = (measure_kept(models[value], (x,)).total for value in models)
    assert chosen <= exact
    if storage is None:
        helpers.only_on_cpu(device)
        assert_all_same(*(gradients(model, x, plainly) for model in (models["few_bit"], stock)))
