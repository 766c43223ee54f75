"""Dropout in every spelling, under a tape: stock's masks from stock's draws, for a state or one bit an element."""

import threading
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_memsave.tape import dropout as module
from support.helpers import (
    DTYPES,
    LAYOUTS,
    assert_backward_twice,
    assert_exact,
    assert_gradients_are_right,
    assert_same_bits,
    assert_same_result,
    generator_state,
    kept,
    only_on_cpu,
    random,
    run,
    taping,
    then_draws,
)
from support.tapes import is_remade

HOW = ("seed", "mask", "stock")
#: What the kept state of the generator takes.
STATE = {"cpu": 5056, "cuda": 16}
SPELLINGS = {
    "F.dropout": F.dropout,
    "F.dropout, by name": lambda x, p: F.dropout(input=x, p=p, training=True, inplace=False),
    "F.dropout, in place": lambda x, p: F.dropout(x * 1, p, True, True),
    "torch.dropout": lambda x, p: torch.dropout(x, p, True),
    "torch.dropout, by name": lambda x, p: torch.dropout(input=x, p=p, train=True),
    "nn.Dropout": lambda x, p: nn.Dropout(p)(x),
    "nn.Dropout, in place": lambda x, p: nn.Dropout(p, inplace=True)(x * 1),
    "F.alpha_dropout": lambda x, p: F.alpha_dropout(x, p, True),
    "F.alpha_dropout, in place": lambda x, p: F.alpha_dropout(x * 1, p, True, True),
    "torch.alpha_dropout": lambda x, p: torch.alpha_dropout(x, p, True),
    "nn.AlphaDropout": lambda x, p: nn.AlphaDropout(p)(x),
    "F.feature_alpha_dropout": lambda x, p: F.feature_alpha_dropout(x, p, True),
    "nn.FeatureAlphaDropout": lambda x, p: nn.FeatureAlphaDropout(p)(x),
    "torch.feature_dropout": lambda x, p: torch.feature_dropout(x, p, True),
    "F.dropout1d": lambda x, p: F.dropout1d(x, p),
    "F.dropout1d, in place": lambda x, p: F.dropout1d(x * 1, p, True, True),
    "F.dropout1d of one sample": lambda x, p: F.dropout1d(x[0], p),
    "F.dropout2d": lambda x, p: F.dropout2d(x[None], p),
    "F.dropout3d": lambda x, p: F.dropout3d(x[None, None], p),
    "F.dropout3d of one sample": lambda x, p: F.dropout3d(x[None], p),
    "nn.Dropout2d": lambda x, p: nn.Dropout2d(p)(x[None]),
}


@pytest.fixture(params=HOW)
def how(request):
    return partial(taping, dropout=request.param)


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
def test_it_is_exact_and_draws_as_much_as_stock(device, how, name):
    only_on_cpu(device)
    for (dtype, p, layout, shape), wanted in product(CASES, (True, False)):
        if layout == "expanded" and "in place" in name:  # nothing can be written to it
            continue
        view = LAYOUTS.get(layout, torch.clone)
        fn = then_draws(lambda x, p=p, view=view: SPELLINGS[name](view(x), p))
        assert_exact(fn, fn, [random(*shape, dtype=dtype, device=device)], how, wanted=[wanted])


@pytest.mark.parametrize("p", [0.0, 0.1, 0.9, 1.0])
def test_it_drops_what_stock_drops(device, how, p):
    """On CUDA too."""
    x, states = torch.ones(2000, device=device), []  # more than the generator's state takes
    ours, stock = (
        (run(lambda x: F.dropout(x, p), [x], tape=tape), states.append(generator_state(device)))[0]
        for tape in (how, False)
    )
    assert torch.equal(ours.output == 0, stock.output == 0)
    assert torch.equal(ours.of_consumer == 0, stock.output == 0), "backward saw another mask"
    assert torch.equal(ours.of_inputs[0] == 0, stock.output == 0), "backward used another mask"
    assert torch.equal(*states), "it drew more or less"


def test_backward_neither_minds_draws_before_it_nor_draws(device, how):
    x = torch.ones(1000, device=device, requires_grad=True)
    with how():
        y = F.dropout(x, 0.5)
        assert not torch.equal(F.dropout(x, 0.5), y)
        loss = y.square().sum()
    torch.manual_seed(99)
    torch.rand(5, device=device)  # so that the state is not the one that drawing the mask again leaves
    before = generator_state(device)
    loss.backward()
    assert torch.equal(x.grad == 0, y == 0)
    assert torch.equal(generator_state(device), before)


def test_it_does_not_mind_draws_on_another_thread(device):
    """While it draws: a state that did not make the mask is not drawn from again."""
    only_on_cpu(device, "one generator for all threads")
    stop = threading.Event()

    def draw():
        while not stop.is_set():
            torch.rand(10)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(50):
            x = torch.ones(5000, requires_grad=True)
            with taping():
                y = F.dropout(x, 0.5)
                loss = y.square().sum()
            loss.backward()
            assert torch.equal(x.grad == 0, y == 0)
    finally:
        stop.set()
        thread.join()


def test_two_in_a_row_before_a_linear_and_odd_shapes_are_exact(device, how):
    only_on_cpu(device)

    def fn(x, w):
        return F.linear(F.dropout(F.dropout(x, 0.1), 0.5), w)

    for dtype, autocast in ((torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)):
        given = [random(3, 5, 8, dtype=dtype, device=device), random(4, 8, dtype=dtype, device=device, seed=3)]
        assert_exact(fn, fn, given, tape=how, autocast=autocast)
    for shape in ((), (1,), (7,), (9,), (0, 4), (2, 0, 4)):
        assert_exact(F.dropout, F.dropout, [random(*shape, device=device)], tape=how)


@pytest.mark.parametrize("name", ["F.dropout", "F.alpha_dropout", "F.dropout1d"])
def test_it_has_the_right_gradients_and_runs_backward_twice(device, how, name):
    def same_mask(x):
        torch.manual_seed(0)
        return SPELLINGS[name](x, 0.5)

    assert_gradients_are_right(same_mask, random(1, 2, 3, dtype=torch.float64, device=device), tape=how)
    assert_backward_twice(lambda x: SPELLINGS[name](x, 0.5), random(3, 4, 8, device=device), tape=how)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_keeps_a_state_or_one_bit_an_element(device, dtype):
    x, fn = random(30, 50, 9, dtype=dtype, device=device), partial(F.dropout, p=0.1)
    options = dict(producer=torch.sigmoid)  # which keeps the input itself
    noise = x.nbytes if device.type == "cpu" else x.numel()
    stock = x.nbytes + noise + x.nbytes
    assert kept(fn, x, tape=False, **options) == stock
    assert kept(fn, x, tape=partial(taping, dropout="seed"), **options) == x.nbytes + STATE[device.type]
    assert kept(fn, x, tape=partial(taping, dropout="mask"), **options) == x.nbytes + -(-x.numel() // 8)
    assert kept(fn, x, tape=partial(taping, dropout="stock"), **options) == stock


@pytest.mark.parametrize("how", ["seed", "mask"])
def test_alpha_dropout_keeps_no_noise(device, how):
    only_on_cpu(device, "this count of bytes")
    x, fn = random(30, 50, 9, device=device), partial(SPELLINGS["F.alpha_dropout"], p=0.1)
    stock, here = (kept(fn, x, tape, linear=False) for tape in (False, partial(taping, dropout=how)))
    assert stock >= x.nbytes
    assert here == (STATE["cpu"] if how == "seed" else -(-x.numel() // 8))


@pytest.mark.parametrize("name", ["torch.feature_dropout", "F.dropout1d", "F.dropout2d", "F.dropout3d"])
def test_channel_dropout_keeps_one_number_a_channel(device, how, name):
    x, fn = random(30, 50, 9, device=device), partial(SPELLINGS[name], p=0.1)
    channels = {"F.dropout2d": 30, "F.dropout3d": 1}.get(name, 30 * 50)
    assert kept(fn, x, tape=False, producer=torch.sigmoid) == 2 * x.nbytes + 4 * channels
    expected = x.nbytes + 4 * channels + (x.nbytes if how.keywords["dropout"] == "stock" else 0)
    assert kept(fn, x, tape=how, producer=torch.sigmoid) == expected


def test_a_small_mask_is_kept_where_that_is_less_than_a_state(device):
    only_on_cpu(device, "this count of bytes")
    x = random(3, 8, device=device)
    assert kept(F.dropout, x, tape=True, producer=torch.sigmoid) <= kept(F.dropout, x, False, producer=torch.sigmoid)


@pytest.mark.parametrize("name", ["F.dropout", "nn.Dropout", "F.dropout1d"])
def test_its_result_is_remade_where_the_input_is_kept(device, name):
    x = random(30, 50, 90, device=device)
    with taping(inputs=[x]) as tape:
        y = SPELLINGS[name](x, 0.1)
        handle = tape.pack(y)
    assert is_remade(handle) or device.type == "cuda"
    assert_same_bits(handle.get(), y)


def test_in_eval_it_draws_nothing_and_is_stock(device, how):
    in_eval = [
        lambda x: F.dropout(x, 0.3, training=False),
        nn.Dropout(0.3).eval(),
        lambda x: F.alpha_dropout(x, 0.3),
        lambda x: F.dropout1d(x, 0.3, training=False),
    ]
    x = random(3, 4, 8, device=device).requires_grad_()
    for fn in in_eval:
        before = generator_state(device)
        with how():
            assert_same_bits(fn(x), x)
        assert torch.equal(generator_state(device), before)
        assert_same_result(run(fn, [x], tape=how), run(fn, [x]))


@pytest.fixture
def draws(monkeypatch):
    """How often the one kernel that CUDA has for dropout drew again; CPU has that function, too."""
    found, drawn_again = [], module._drawn_again
    monkeypatch.setattr(module, "_drawn_again", lambda *args: found.append(args) or drawn_again(*args))
    return found


def fused_step(of_both=True):
    x, weight = (torch.ones(100, 50, requires_grad=True) for _ in "xw")
    with taping(inputs=[x]) as tape:
        y = module._fused(tape, x, 0.3)
        loss = (y * weight).sum()
    return y.detach().clone(), loss, [weight, x] if of_both else [weight]  # backward has to make y again


def test_one_draw_gives_the_output_and_the_mask_again(draws):
    y, loss, inputs = fused_step()
    for n in (1, 2):  # a second backward draws once more
        of_weight, of_x = torch.autograd.grad(loss, inputs, retain_graph=True)
        assert torch.equal(of_weight, y)
        assert torch.equal(of_x, y)
        assert len(draws) == n


def test_a_mask_that_nobody_asks_for_does_not_wait(draws, monkeypatch):
    made = []
    monkeypatch.setattr(module, "_Again", lambda *args, cls=module._Again: made.append(cls(*args)) or made[-1])
    y, loss, inputs = fused_step(of_both=False)
    torch.autograd.grad(loss, inputs, retain_graph=True)
    assert len(draws) == 1
    assert made[0].is_asked
    assert not made[0].waiting


def test_without_gradients_it_is_stock_and_refuses_what_stock_refuses(device, how):
    x = random(3, 8, device=device)
    torch.manual_seed(3)
    expected = F.dropout(x, 0.5)
    torch.manual_seed(3)
    with how(), torch.no_grad():
        assert_same_bits(F.dropout(x, 0.5), expected)
    for p in (-0.1, 1.1):
        with how(), pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
            F.dropout(random(3, device=device).requires_grad_(), p)
