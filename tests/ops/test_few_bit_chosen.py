"""``few_bit`` keeps bits where nobody wants the output; where somebody does, it is exact and keeps what that does."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, QuickGELUActivation, SiLUActivation

from hf_memsave import measure_kept
from hf_memsave.ops import few_bit as module_of_few_bit
from hf_memsave.ops.few_bit import FewBit, kept_bytes
from hf_memsave.tape.content import Content
from support.helpers import (
    DTYPES,
    LAYOUTS,
    Probe,
    assert_backward_twice,
    assert_exact,
    assert_same_bits,
    kept,
    nbytes,
    only_on_cpu,
    random,
    swapped,
    taping,
)

MODULES = {
    "gelu": nn.GELU,
    "gelu-tanh": partial(nn.GELU, "tanh"),
    "silu": nn.SiLU,
    "transformers-gelu": GELUActivation,
    "transformers-gelu-tanh": GELUTanh,
    "new-gelu": NewGELUActivation,
    "quick-gelu": QuickGELUActivation,
    "transformers-silu": SiLUActivation,
}


@pytest.fixture(params=MODULES)
def kind(request):
    return request.param


def few_bit(module, bits=4):
    return swapped(module, "activation", FewBit(bits))


@pytest.fixture
def op(kind):
    return few_bit(MODULES[kind]())


@pytest.fixture
def stock(kind):
    return MODULES[kind]()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_bit_is_exact_where_its_output_is_wanted(device, op, stock, dtype):
    only_on_cpu(device)
    assert_exact(op, stock, [random(7, 5, 9, dtype=dtype, device=device)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_bit_is_exact_there_under_autocast(device, op, stock, dtype):
    only_on_cpu(device)
    assert_exact(op, stock, [random(3, 8, dtype=dtype, device=device)], autocast=torch.bfloat16)


def test_few_bit_goes_back_under_the_autocast_of_its_forward(device):
    only_on_cpu(device)

    def rounded(x):  # an activation in which autocast converts
        return torch.nn.functional.gelu(x @ torch.eye(8, device=device)).float()

    op = partial(module_of_few_bit.few_bit, name="gelu", forward=rounded)
    assert_exact(op, rounded, [random(3, 8, device=device)], autocast=torch.bfloat16)


@pytest.mark.parametrize("kind", ["gelu", "new-gelu"])
def test_few_bit_is_exact_there_for_a_view(device, op, stock):
    only_on_cpu(device)
    assert_exact(lambda x: op(x.transpose(0, 1)), lambda x: stock(x.transpose(0, 1)), [random(4, 5, 8, device=device)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_bit_of_a_part_keeps_no_more_than_the_exact_op(device, layout):
    """Where keeping the output and bits takes less than the whole that the part lies in."""
    view, x = LAYOUTS[layout], random(4, 5, 8, device=device)
    options = dict(tape=True, producer=torch.ops.aten.clone)
    exact = kept(lambda x: nn.functional.gelu(view(x)), x, **options)
    assert kept(lambda x: few_bit(nn.GELU())(view(x)), x, **options) <= exact + -(-view(x).numel() // 8) * 4 + 1


@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (2, 1, 7)], ids=str)
def test_few_bit_is_exact_there_for_odd_shapes(device, op, stock, shape):
    only_on_cpu(device)
    assert_exact(op, stock, [random(*shape, device=device)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_bit_keeps_what_the_exact_op_does_before_a_trained_linear(device, op, dtype):
    x = random(3, 5, 8, dtype=dtype, device=device)
    claim = kept_bytes(tuple(x.shape), x.itemsize, frozen=False)
    assert kept(op, x, tape=True) == claim.here == nbytes(x)


def test_few_bit_keeps_its_bits_before_a_frozen_linear(device, op):
    x = random(3, 16, 8, dtype=torch.bfloat16, device=device).requires_grad_()
    frozen = nn.Linear(8, 2, device=device, dtype=torch.bfloat16).requires_grad_(False)
    found = measure_kept(Probe(op, True, torch.clone, frozen, None), x)
    assert found.total - 2 == kept_bytes(tuple(x.shape), 2).here == nbytes(x) // 4 + 1  # 2 bytes of loss


@pytest.mark.parametrize("kind", ["gelu"])
def test_few_bit_keeps_no_more_than_stock_where_its_input_is_kept_anyway(device, op, stock):
    x = random(3, 5, 8, device=device)
    assert kept(op, x, tape=True, producer=torch.sigmoid) == nbytes(x)
    assert kept(stock, x, tape=False, producer=torch.sigmoid) == 2 * nbytes(x)


@pytest.mark.parametrize("kind", ["silu"])
def test_few_bit_runs_backward_twice_where_it_is_exact(device, op):
    assert_backward_twice(op, random(3, 8, device=device))


def block(act, trained):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), act, nn.Linear(16, 8))
    model[2].requires_grad_(trained)
    return model


def in_a_tape(model, x):
    with taping():
        return model(x)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("trained", [True, False])
def test_few_bit_chooses_in_a_checkpointed_block(device, use_reentrant, trained):
    def gradients(act, checkpointed):
        model = block(act, trained).to(device)
        x = random(64, 8, device=device).requires_grad_()
        y = checkpoint(in_a_tape, model, x, use_reentrant=use_reentrant) if checkpointed else in_a_tape(model, x)
        y.square().sum().backward()
        return [x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]

    expected = gradients(nn.GELU(), False) if trained else gradients(few_bit(nn.GELU()), False)
    for mine, theirs in zip(gradients(few_bit(nn.GELU()), True), expected, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("trained", [True, False])
def test_few_bit_chooses_inside_another_tools_hooks(device, trained):
    found = []
    for hooks in (save_on_cpu(), taping()):
        model, x = block(few_bit(nn.GELU()), trained).to(device), random(64, 8, device=device).requires_grad_()
        with hooks:
            y = in_a_tape(model, x)
        y.square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters() if p.requires_grad)])
    for mine, theirs in zip(*found, strict=True):
        assert_same_bits(mine, theirs)


def test_few_bit_keeps_its_bits_where_a_foreign_hook_lies_before_the_consumer(device):
    model, x = block(few_bit(nn.GELU()), True).to(device), random(64, 8, device=device).requires_grad_()
    seen = []
    with taping():
        y = model[1](model[0](x))
        with saved_tensors_hooks(lambda t: (seen.append(t.shape), t)[1], lambda t: t):
            z = model[2](y)
    z.sum().backward()
    assert y.shape in seen
    assert_same_bits(x.grad, few_bit_gradient(model, x))


def few_bit_gradient(model, x):
    """By the definition, through a first linear, an activation of 4 bits and a second linear, for a sum."""
    with torch.no_grad():
        z = model[0](x)
    y = z.requires_grad_()
    slopes = torch.autograd.grad(module_of_few_bit.few_bit(y, "gelu", nn.GELU()).sum(), y)[0]
    dy = torch.ones(len(x), model[2].out_features) @ model[2].weight
    return (dy * slopes).detach() @ model[0].weight.detach()


def test_an_output_that_its_user_holds_is_not_taken(device):
    held = []

    def hold(y):
        held.append(y.detach())
        return y

    op, x = few_bit(nn.GELU()), random(3, 16, 8, device=device)
    frozen = nn.Linear(8, 2, device=device).requires_grad_(False)
    found = measure_kept(Probe(lambda x: hold(op(x)), True, torch.clone, frozen, None), x.requires_grad_())
    assert found.total - 4 == nbytes(x) + kept_bytes(tuple(x.shape), 4).here


def test_an_output_that_was_written_to_is_kept_beside_the_bits(device):
    op, x = few_bit(nn.GELU()), random(3, 16, 8, device=device)
    assert kept(lambda x: op(x).neg_(), x, tape=True) == nbytes(x) + kept_bytes(tuple(x.shape), 4).here


def test_an_input_that_was_written_to_is_not_promised_from(device):
    op, x, slope = few_bit(nn.GELU()), random(64, device=device), []
    for change in (False, True):
        leaf, weight = x.clone().requires_grad_(), torch.ones(64, device=device, requires_grad=True)
        with taping():
            z = leaf * 1
            y = op(z)
            if change:
                with torch.no_grad():
                    z.zero_()
            product = y * weight
        product.sum().backward()
        assert_same_bits(weight.grad, nn.GELU()(x))
        slope.append(leaf.grad)
    assert 0 < (slope[0] - slope[1]).abs().max() < 0.1  # of the bits, of the input as it was


def test_few_bit_chooses_on_every_thread(device):
    only_on_cpu(device)
    x = random(64, 8, device=device)
    models = [block(few_bit(nn.GELU()), trained=bool(i % 2)) for i in range(6)]

    def gradient(model):
        leaf = x.clone().requires_grad_()
        in_a_tape(model, leaf).square().sum().backward()
        return leaf.grad

    expected = list(map(gradient, models))
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(gradient, models))
    for mine, theirs in zip(found, expected, strict=True):
        assert_same_bits(mine, theirs)


def no_way_given(monkeypatch):
    monkeypatch.setattr(Content, "give_way", lambda self, content: None)


def level_for_slope(monkeypatch):
    monkeypatch.setattr(module_of_few_bit, "_exact", lambda x, dy, ctx: dy * (x > 0))


@pytest.mark.parametrize("plant", [no_way_given, level_for_slope])
def test_a_fault_is_caught(device, plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        assert_exact(few_bit(nn.GELU()), nn.GELU(), [random(7, 5, device=device)])


def test_a_code_that_stays_is_caught(device, monkeypatch):
    no_way_given(monkeypatch)
    x = random(3, 5, 8, device=device)
    assert kept(few_bit(nn.GELU()), x, tape=True) > kept_bytes(tuple(x.shape), 4, frozen=False).here
