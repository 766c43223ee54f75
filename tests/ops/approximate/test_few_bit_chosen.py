"""``few_bit`` keeps bits where nothing wants the output; else it is exact, alone and in models."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, QuickGELUActivation, SiLUActivation

from hf_memsave import MemSaveConfig, measure_kept, patch
from hf_memsave.ops.approximate import few_bit as module_of_few_bit
from hf_memsave.ops.approximate.few_bit import FewBit
from hf_memsave.tape.content import Content
from support.families import Size, batch_for, build
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
from support.pairs import pairwise
from support.steps import assert_same, step

SIZE = Size(hidden=64)
#: Of the expression of NewGELU: float64 numbers that autograd keeps for the exact op.
FACTORS = 3 * 8
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


def few_bit(module, bits=4):
    return swapped(module, "activation", FewBit(bits))


def code_bytes(x):
    """In 4 bits an element, and a byte for 1024."""
    return 4 * -(-x.numel() // 8) + -(-x.numel() // 1024)


@pytest.mark.parametrize(
    ("kind", "dtype", "shape", "autocast"),
    pairwise(MODULES, DTYPES, [(7, 5, 9), (), (3,), (0, 4), (2, 1, 7)], [None, torch.bfloat16]),
)
def test_few_bit_is_exact_where_its_output_is_wanted(device, kind, dtype, shape, autocast):
    only_on_cpu(device)
    op, stock, x = few_bit(MODULES[kind]()), MODULES[kind](), random(*shape, dtype=dtype, device=device)
    assert_exact(op, stock, [x], autocast=autocast)
    if len(shape) == 3:
        assert_exact(lambda x: op(x.transpose(0, 1)), lambda x: stock(x.transpose(0, 1)), [x])


def test_few_bit_goes_back_under_the_autocast_of_its_forward(device):
    only_on_cpu(device)

    def rounded(x):  # an activation in which autocast converts
        return torch.nn.functional.gelu(x @ torch.eye(8, device=device)).float()

    op = partial(module_of_few_bit.few_bit, name="gelu", forward=rounded)
    assert_exact(op, rounded, [random(3, 8, device=device)], autocast=torch.bfloat16)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_bit_of_a_part_keeps_no_more_than_the_exact_op(device, layout):
    """Where keeping the output and bits takes less than the whole that the part lies in."""
    view, x = LAYOUTS[layout], random(4, 5, 8, device=device)
    options = dict(tape=True, producer=torch.ops.aten.clone)
    exact = kept(lambda x: nn.functional.gelu(view(x)), x, **options)
    assert kept(lambda x: few_bit(nn.GELU())(view(x)), x, **options) <= exact + -(-view(x).numel() // 8) * 4 + 1


@pytest.mark.parametrize("kind", MODULES)
def test_few_bit_keeps_what_the_exact_op_does_before_a_trained_linear_and_bits_before_a_frozen_one(device, kind):
    op = few_bit(MODULES[kind]())
    for dtype in DTYPES:
        x = random(3, 5, 8, dtype=dtype, device=device)
        assert kept(op, x, tape=True) == nbytes(x)
    x = random(3, 16, 8, dtype=torch.bfloat16, device=device).requires_grad_()
    frozen = nn.Linear(8, 2, device=device, dtype=torch.bfloat16).requires_grad_(False)
    found = measure_kept(Probe(op, True, torch.clone, frozen, None), x)
    assert found.total - 2 == code_bytes(x) == nbytes(x) // 4 + 1  # 2 bytes of loss


def test_few_bit_keeps_no_more_than_stock_where_its_input_is_kept_anyway(device):
    x = random(3, 5, 8, device=device)
    assert kept(few_bit(nn.GELU()), x, tape=True, producer=torch.sigmoid) == nbytes(x)
    assert kept(nn.GELU(), x, tape=False, producer=torch.sigmoid) == 2 * nbytes(x)
    assert_backward_twice(few_bit(nn.SiLU()), x)


def block(act, trained):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), act, nn.Linear(16, 8))
    model[2].requires_grad_(trained)
    return model


def in_a_tape(model, x):
    with taping():
        return model(x)


@pytest.mark.parametrize(("use_reentrant", "trained"), [(True, True), (False, True), (False, False)])
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


def test_an_output_that_its_user_holds_is_not_taken_and_one_that_was_written_to_is_kept_beside_the_bits(device):
    held = []

    def hold(y):
        held.append(y.detach())
        return y

    op, x = few_bit(nn.GELU()), random(3, 16, 8, device=device)
    frozen = nn.Linear(8, 2, device=device).requires_grad_(False)
    found = measure_kept(Probe(lambda x: hold(op(x)), True, torch.clone, frozen, None), x.requires_grad_())
    assert found.total - 4 == nbytes(x) + code_bytes(x)
    x = random(3, 16, 8, device=device)
    assert kept(lambda x: op(x).neg_(), x, tape=True) == nbytes(x) + code_bytes(x)


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


@pytest.mark.parametrize(
    "plant",
    [
        (Content, "give_way", lambda self, content: None),
        (module_of_few_bit, "run_under", lambda autocast, forward, x: x * (x > 0)),
    ],
    ids=["a code stays", "a level for a slope"],
)
def test_a_fault_is_caught(device, plant, monkeypatch):
    monkeypatch.setattr(*plant)
    x = random(7, 5, device=device)
    with pytest.raises(AssertionError):
        assert_exact(few_bit(nn.GELU()), nn.GELU(), [x])
    assert plant[0] is not Content or kept(few_bit(nn.GELU()), x, tape=True) > nbytes(x)


def chain(trained):
    """Two activations: the linear after the first is trained or not, that after the second the other way."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)]
    model = nn.Sequential(*layers, nn.Linear(8, 2))
    model[2].requires_grad_(trained == 0)
    model[5].requires_grad_(trained == 1)
    return model


def of_chain(model, x):
    leaf = x.clone().requires_grad_()
    model(leaf).square().sum().backward()
    return leaf.grad


@pytest.mark.parametrize("trained", [0, 1])
def test_each_activation_of_a_model_chooses_for_itself(device, trained):
    stock = chain(trained).to(device)
    exact, ours = copy.deepcopy(stock), copy.deepcopy(stock)
    patch(exact)
    patch(ours, MemSaveConfig(activation="few_bit"))
    x = random(64, 8, device=device)
    n = 64 * 16
    freed = measure_kept(exact, x).total - measure_kept(ours, x).total
    assert freed == n * 4 - (n // 2 + n // 1024)  # one of both, in 4 bits and a byte
    for model in (stock, ours):
        of_chain(model, x)
    after, before = (ours[3].weight.grad, stock[3].weight.grad) if trained else (None, None)
    assert_same_bits(after, before)  # of what lies behind the activation that keeps bits
    assert not torch.equal(ours[0].weight.grad, stock[0].weight.grad)


@pytest.mark.parametrize("after", [nn.Dropout(0.3), nn.GELU(), nn.LayerNorm(16)], ids=str)
def test_few_bit_is_exact_where_its_output_is_wanted_in_the_end(device, after):
    only_on_cpu(device)
    found = []
    for config in ({"activation": "few_bit"}, None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), copy.deepcopy(after), nn.Linear(16, 2)).to(device)
        if config is not None:
            patch(model, config)
        found.append(of_chain(model, random(32, 8, device=device)))
    assert_same_bits(*found)


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5-gated-encoder"])
def test_a_model_that_is_trained_whole_gets_the_exact_config(device, family):
    only_on_cpu(device)
    exact = build(family, SIZE).to(device)
    ours, stock = copy.deepcopy(exact), copy.deepcopy(exact)
    patch(exact)
    patch(ours, MemSaveConfig(activation="few_bit"))
    batch = batch_for(stock, SIZE)
    factors = measure_kept(exact, batch).total - measure_kept(ours, batch).total
    assert factors == FACTORS * {"gpt2": 2, "t5-gated-encoder": 4}.get(family, 0)
    assert_same(step(ours, batch), step(stock, batch))


@pytest.mark.parametrize("targets, is_wanted", [(["query"], False), (["query", "output.dense"], True)], ids=str)
def test_lora_decides_by_whether_it_reads_the_output(device, targets, is_wanted):
    only_on_cpu(device)

    def make(config):
        torch.manual_seed(0)
        lora = LoraConfig(target_modules=targets, lora_dropout=0.1, init_lora_weights=False)
        model = get_peft_model(build("bert", SIZE), lora).to(device)
        if config is not None:
            patch(model, config)
        return model

    exact, ours, stock = (make(config) for config in (True, {"activation": "few_bit"}, None))
    batch = batch_for(build("bert", SIZE), SIZE)
    freed = measure_kept(exact, batch).total - measure_kept(ours, batch).total
    n = SIZE.u(4) // 4 * 4
    # The first block's activation has no gradient before its first adapter; the other keeps an eighth of its input.
    assert freed == (0 if is_wanted else 2 * (4 * n - n // 2 - -(-n // 1024)))
    if is_wanted:
        assert_same(step(ours, batch), step(stock, batch))


@pytest.mark.parametrize("trained", [True, False])
def test_the_report_counts_what_it_frees(device, trained):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8).requires_grad_(trained)).to(device)
    x = random(64, 8, device=device)
    stock = measure_kept(model, (x.requires_grad_(),)).total
    report = patch(model, MemSaveConfig(activation="few_bit"))
    model(x).sum().backward()
    assert report.step.nbytes_avoided == stock - measure_kept(model, (x,)).total >= 64 * 16 * 3


@pytest.mark.parametrize(
    ("norm", "trained", "storage"), pairwise([nn.LayerNorm, nn.BatchNorm1d], [True, False], [None, "int8"])
)
def test_few_bit_keeps_no_more_than_the_exact_op_after_a_norm(device, norm, trained, storage):
    """The norm keeps what the activation's input is promised from."""
    stock = nn.Sequential(nn.Linear(64, 64), norm(64), nn.GELU(), nn.Linear(64, 64)).to(device)
    stock[-1].requires_grad_(trained)
    x, models = random(32, 64, device=device), {}
    for value in ("recompute", "few_bit"):
        models[value] = copy.deepcopy(stock)
        patch(models[value], MemSaveConfig(activation=value, storage=storage))
    exact, chosen = (measure_kept(models[value], (x,)).total for value in models)
    assert chosen <= exact
    if storage is None:
        only_on_cpu(device)
        for model in (stock, models["few_bit"]):
            model(x).square().sum().backward()
        for mine, expected in zip(models["few_bit"].parameters(), stock.parameters(), strict=True):
            assert (mine.grad is None and expected.grad is None) or torch.equal(mine.grad, expected.grad)
