"""Dropout in every spelling, under a tape: stock's masks from stock's draws, for a state or one bit an element."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_memsave.tape import dropout as module
from support import helpers
from support.pairs import pairwise

HOW = {how: partial(helpers.taping, dropout=how) for how in ("auto", "seed", "mask", "stock")}
each_way = pytest.mark.parametrize("how", HOW.values(), ids=HOW)
SPELLINGS = {
    "F.dropout": F.dropout,
    "F.dropout, by name": lambda x, p: F.dropout(input=x, p=p, training=True, inplace=False),
    "F.dropout, in place": lambda x, p: F.dropout(x * 1, p, True, True),
    "torch.dropout": lambda x, p: torch.dropout(x, p, True),
    "torch.dropout, by name": lambda x, p: torch.dropout(input=x, p=p, train=True),
    "nn.Dropout": lambda x, p: nn.Dropout(p)(x),
    "F.alpha_dropout": lambda x, p: F.alpha_dropout(x, p, True),
    "F.alpha_dropout, in place": lambda x, p: F.alpha_dropout(x * 1, p, True, True),
    "torch.alpha_dropout": lambda x, p: torch.alpha_dropout(x, p, True),
    "F.feature_alpha_dropout": lambda x, p: F.feature_alpha_dropout(x, p, True),
    "torch.feature_dropout": lambda x, p: torch.feature_dropout(x, p, True),
    "F.dropout1d": lambda x, p: F.dropout1d(x, p),
    "F.dropout1d, in place": lambda x, p: F.dropout1d(x * 1, p, True, True),
    "F.dropout1d of one sample": lambda x, p: F.dropout1d(x[0], p),
    "F.dropout2d": lambda x, p: F.dropout2d(x[None], p),
    "F.dropout3d": lambda x, p: F.dropout3d(x[None, None], p),
    "F.dropout3d of one sample": lambda x, p: F.dropout3d(x[None], p),
    "F.dropout3d of three dimensions": lambda x, p: F.dropout3d(x, p),  # one sample too, to stock
}
#: Dtype, probability, layout and shape.
CASES = [
    (torch.float32, 0.1, None, (3, 5, 200)),  # more than the generator's state takes
    (torch.bfloat16, 0.5, "transposed", (4, 5, 8)),
    (torch.float16, 1.0, "sliced", (2, 3, 6)),
    (torch.float64, 0.9, "offset", (5, 10, 20)),
    (torch.float32, 0.0, None, (1, 3, 5)),
    (torch.float32, 0.1, "expanded", (1, 1, 1)),
]


@pytest.mark.parametrize("name", SPELLINGS)
def test_it_is_exact_and_draws_as_much_as_stock(device, name):
    helpers.only_on_cpu(device)
    for (dtype, p, layout, shape), how, wanted in pairwise(CASES, HOW.values(), (True, False)):
        if layout == "expanded" and "in place" in name:  # nothing can be written to it
            continue
        view = helpers.LAYOUTS.get(layout, torch.clone)
        fn = helpers.then_draws(lambda x, p=p, view=view: SPELLINGS[name](view(x), p))
        helpers.assert_exact(fn, fn, [helpers.random(*shape, dtype=dtype, device=device)], how, wanted=[wanted])
    for shape, how in product(((), (1,), (9,), (2, 0, 4)) if name == "F.dropout" else (), HOW.values()):
        helpers.assert_exact(F.dropout, F.dropout, [helpers.random(*shape, device=device)], how)


@each_way
@pytest.mark.parametrize("p", [0.0, 0.1, 0.9, 1.0])
def test_it_drops_what_stock_drops(device, how, p):
    """On CUDA too."""
    x, states = torch.ones(2000, device=device), []  # more than the generator's state takes
    ours, stock = (
        (helpers.run(lambda x: F.dropout(x, p), [x], tape=tape), states.append(helpers.generator_state(device)))[0]
        for tape in (how, False)
    )
    for seen in (ours.output, ours.of_consumer, ours.of_inputs[0]):  # forward, and twice what backward saw
        assert torch.equal(seen == 0, stock.output == 0)
    assert torch.equal(*states), "it drew more or less"


@each_way
def test_backward_neither_minds_draws_before_it_nor_draws(device, how):
    x = torch.ones(1000, device=device, requires_grad=True)
    with how():
        y = F.dropout(x, 0.5)
        assert not torch.equal(F.dropout(x, 0.5), y)
        loss = y.square().sum()
    torch.manual_seed(99)
    torch.rand(5, device=device)  # so that the state is not the one that drawing the mask again leaves
    before = helpers.generator_state(device)
    loss.backward()
    assert torch.equal(x.grad == 0, y == 0)
    assert torch.equal(helpers.generator_state(device), before)


@each_way
@pytest.mark.parametrize("name", ["F.dropout", "F.alpha_dropout", "F.dropout1d"])
def test_it_has_the_right_gradients_and_runs_backward_twice(device, how, name):
    def same_mask(x):
        torch.manual_seed(0)
        return SPELLINGS[name](x, 0.5)

    helpers.assert_gradients_are_right(same_mask, helpers.random(1, 2, 3, dtype=torch.float64, device=device), tape=how)
    helpers.assert_backward_twice(lambda x: SPELLINGS[name](x, 0.5), helpers.random(3, 4, 8, device=device), tape=how)


def kept_of(name, x, how, **options):
    return helpers.kept(partial(SPELLINGS[name], p=0.1), x, tape=HOW.get(how, False), **options)


@pytest.mark.parametrize("dtype", helpers.DTYPES, ids=str)
def test_it_keeps_a_state_or_one_bit_an_element(device, dtype):
    x, options = (
        helpers.random(30, 50, 9, dtype=dtype, device=device),
        dict(producer=torch.sigmoid),
    )  # which keeps the input
    stock = x.nbytes + (x.nbytes if device.type == "cpu" else x.numel()) + x.nbytes
    state = {"cpu": 5056, "cuda": 16}[device.type]
    expected = {"seed": x.nbytes + state, "auto": x.nbytes + (state if device.type == "cuda" else -(-x.numel() // 8))}
    expected |= {"mask": x.nbytes + -(-x.numel() // 8), "stock": stock, None: stock}
    assert {how: kept_of("F.dropout", x, how, **options) for how in expected} == expected
    if device.type == "cpu":
        alpha = {how: kept_of("F.alpha_dropout", x, how, linear=False) for how in expected}
        assert (alpha["seed"], alpha["mask"]) == (state, -(-x.numel() // 8))
        assert alpha["stock"] == alpha[None] >= x.nbytes
        small = helpers.random(3, 8, device=device)  # whose mask takes less than a state
        assert kept_of("F.dropout", small, "seed", **options) == kept_of("F.dropout", small, "mask", **options)


#: More elements than eight for each byte of a state.
N = 151 * 7 * 40
#: Case -> dtype, and how many elements.
CHOSEN = {
    "fp32": (torch.float32, N), "bf16": (torch.bfloat16, N), "bf16, cast to fp32": (torch.bfloat16, N),
    "bf16, few elements": (torch.bfloat16, 40000),
}  # fmt: skip


@pytest.mark.parametrize("case", CHOSEN)
def test_a_tape_keeps_what_is_quick_to_read_or_if_asked_what_is_small(device, case):
    helpers.only_on_cpu(device, "the choice")
    dtype, n = CHOSEN[case]

    def drop(x):
        return F.dropout(x.float() if "cast" in case else x, 0.1)

    kept_by = partial(helpers.kept, drop, helpers.random(n, dtype=dtype), producer=torch.sigmoid)
    assert kept_by(tape=HOW["auto"]) == n * dtype.itemsize + -(-n // 8)
    assert kept_by(tape=partial(helpers.taping, dropout="small")) == n * dtype.itemsize + min(-(-n // 8), 5056)
    x = helpers.random(151, n // 151 // 40, 40, dtype=dtype)
    for view in (torch.clone, helpers.LAYOUTS["transposed"]):
        fn = helpers.then_draws(lambda x, view=view: drop(view(x)))
        helpers.assert_exact(fn, fn, [x], HOW["auto"])


@pytest.mark.parametrize("name", ["torch.feature_dropout", "F.dropout1d", "F.dropout2d", "F.dropout3d"])
def test_channel_dropout_keeps_one_number_a_channel(device, name):
    x = helpers.random(30, 50, 9, device=device)
    here = x.nbytes + 4 * {"F.dropout2d": 30, "F.dropout3d": 1}.get(name, 30 * 50)
    expected = {"auto": here, "seed": here, "mask": here, "stock": here + x.nbytes, None: here + x.nbytes}
    assert {how: kept_of(name, x, how, producer=torch.sigmoid) for how in expected} == expected


@each_way
def test_it_is_stock_in_eval_and_without_gradients_and_refuses_what_stock_refuses(device, how):
    in_eval = [
        lambda x: F.dropout(x, 0.3, training=False), nn.Dropout(0.3).eval(), lambda x: F.alpha_dropout(x, 0.3),
        lambda x: F.dropout1d(x, 0.3, training=False),
    ]  # fmt: skip
    x = helpers.random(3, 4, 8, device=device).requires_grad_()
    for fn in in_eval:
        before = helpers.generator_state(device)
        with how():
            helpers.assert_same_bits(fn(x), x)
        assert torch.equal(helpers.generator_state(device), before)
        helpers.assert_same_result(helpers.run(fn, [x], tape=how), helpers.run(fn, [x]))
    torch.manual_seed(3)
    expected = F.dropout(x.detach(), 0.5)
    torch.manual_seed(3)
    with how(), torch.no_grad():
        helpers.assert_same_bits(F.dropout(x, 0.5), expected)
    for p in (-0.1, 1.1):
        with how(), pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
            F.dropout(x, p)


def test_one_draw_of_the_fused_kernel_gives_the_output_and_the_mask_again(monkeypatch):
    """CPU has that function, too. A mask that is not asked for does not wait beyond backward."""
    draws, made, redrawn = [], [], module.redrawn
    monkeypatch.setattr(module, "redrawn", lambda *args: draws.append(args) or redrawn(*args))
    monkeypatch.setattr(module, "_Redrawn", lambda *args, cls=module._Redrawn: made.append(cls(*args)) or made[-1])
    x, weight = (torch.ones(100, 50, requires_grad=True) for _ in "xw")
    with helpers.taping(inputs=[x]) as tape:
        y = module._fused(tape, x, 0.3)
        loss = (y * weight).sum()  # backward has to make y again
    for n in (1, 2):  # a second backward draws once more
        for gradient in torch.autograd.grad(loss, [weight, x], retain_graph=True):
            assert torch.equal(gradient, y)
        assert len(draws) == n
    torch.autograd.grad(loss, [weight], retain_graph=True)
    assert len(draws) == 3
    assert made[0].is_asked
    assert not made[0].waiting
