"""``dropout``: stock's masks from stock's draws, for the generator's state or one bit an element."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_memsave.ops.dropout import DROPOUT, dropout, dropout_reference, kept_bytes
from hf_memsave.tape import Tape
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
    swapped,
)

HOW = ("seed", "mask")


@pytest.fixture(params=HOW)
def how(request):
    return request.param


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_is_exact(device, how, dtype, p, wanted):
    only_on_cpu(device)
    x = random(3, 5, 8, dtype=dtype, device=device)
    assert_exact(lambda x: dropout(x, p, how), lambda x: dropout_reference(x, p), [x], wanted=[wanted])


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_dropout_drops_what_stock_drops(device, how, p):
    x = torch.ones(1000, device=device)
    ours = run(lambda x: dropout(x, p, how), [x], tape=True)
    stock = run(lambda x: dropout_reference(x, p), [x])
    assert torch.equal(ours.output == 0, stock.output == 0)
    assert torch.equal(ours.of_consumer == 0, stock.output == 0), "backward saw another mask"
    assert torch.equal(ours.of_inputs[0] == 0, stock.output == 0), "backward used another mask"


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("size", [1, 15, 16, 1000])
def test_dropout_draws_as_much_as_stock(device, how, size, p):
    x = random(size, device=device).requires_grad_()
    torch.manual_seed(3)
    dropout_reference(x, p)
    expected = generator_state(device)
    torch.manual_seed(3)
    with Tape():
        dropout(x, p, how)
    assert torch.equal(generator_state(device), expected)


def test_dropout_leaves_the_generator_alone_in_backward(device, how):
    x = random(100, device=device).requires_grad_()
    with Tape():
        loss = dropout(x, 0.5, how).square().sum()
    torch.rand(5, device=device)  # so that the state is not the one that drawing the mask again leaves
    before = generator_state(device)
    loss.backward()
    assert torch.equal(generator_state(device), before)


def test_dropout_does_not_mind_draws_before_backward(device, how):
    x = torch.ones(1000, device=device, requires_grad=True)
    with Tape():
        y = dropout(x, 0.5, how)
        loss = y.square().sum()
    torch.manual_seed(99)
    torch.rand(5, device=device)
    loss.backward()
    assert torch.equal(x.grad == 0, y == 0)


def test_dropout_draws_anew_each_time(device, how):
    x = torch.ones(1000, device=device, requires_grad=True)
    with Tape():
        assert not torch.equal(dropout(x, 0.5, how), dropout(x, 0.5, how))


def test_two_dropouts_in_a_row_are_exact(device, how):
    only_on_cpu(device)
    assert_exact(
        lambda x: dropout(dropout(x, 0.1, how), 0.5, how),
        lambda x: dropout_reference(dropout_reference(x, 0.1), 0.5),
        [random(3, 5, 8, device=device)],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_before_a_linear_is_exact(device, how, dtype):
    only_on_cpu(device)
    assert_exact(
        lambda x, w: F.linear(dropout(x, 0.1, how), w),
        lambda x, w: F.linear(dropout_reference(x, 0.1), w),
        [random(3, 5, 8, dtype=dtype, device=device), random(4, 8, dtype=dtype, device=device, seed=3)],
    )


def test_dropout_before_a_linear_is_exact_under_autocast(device, how):
    only_on_cpu(device)
    assert_exact(
        lambda x, w: F.linear(dropout(x, 0.1, how), w),
        lambda x, w: F.linear(dropout_reference(x, 0.1), w),
        [random(3, 5, 8, device=device), random(4, 8, device=device, seed=3)],
        autocast=torch.bfloat16,
    )


@pytest.mark.parametrize("shape", [(), (1,), (7,), (9,), (0, 4), (2, 0, 4), (3, 1, 5)], ids=str)
def test_dropout_is_exact_for_odd_shapes(device, how, shape):
    only_on_cpu(device)
    x = random(*shape, device=device)
    assert_exact(lambda x: dropout(x, 0.5, how), lambda x: dropout_reference(x, 0.5), [x])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_is_exact_for_views(device, how, layout):
    only_on_cpu(device)
    view = LAYOUTS[layout]
    x = random(4, 5, 8, device=device)
    assert_exact(lambda x: dropout(view(x), 0.5, how), lambda x: dropout_reference(view(x), 0.5), [x])


def test_dropout_has_the_right_gradients(device, how):
    def same_mask(x):
        torch.manual_seed(0)
        return dropout(x, 0.5, how)

    assert_gradients_are_right(same_mask, random(3, 4, dtype=torch.float64, device=device))


def test_dropout_runs_backward_twice(device, how):
    assert_backward_twice(lambda x: dropout(x, 0.5, how), random(3, 8, device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_keeps_what_it_claims(device, how, dtype):
    x = random(3, 5, 9, dtype=dtype, device=device)
    claim = kept_bytes(tuple(x.shape), x.itemsize, how, device.type)
    input_itself = x.nbytes  # kept for another reason, by the sigmoid that makes it
    stock = kept(lambda x: dropout_reference(x, 0.1), x, tape=False, producer=torch.sigmoid)
    assert stock == input_itself + claim.eager
    assert kept(lambda x: dropout(x, 0.1, how), x, tape=True, producer=torch.sigmoid) == input_itself + claim.here


def test_dropout_is_stock_without_a_tape(device, how):
    x = random(3, 8, device=device)
    ours, stock = (lambda x: dropout(x, 0.1, how)), (lambda x: dropout_reference(x, 0.1))
    assert_same_result(run(ours, [x]), run(stock, [x]))
    assert kept(ours, x, tape=False) == kept(stock, x, tape=False)


def test_dropout_in_a_module_is_exact(device, how):
    only_on_cpu(device)
    assert_exact(swapped(nn.Dropout(0.3), "dropout", how), nn.Dropout(0.3), [random(3, 8, device=device)])


def test_dropout_in_eval_is_the_input_itself(device, how):
    x = random(3, 8, device=device).requires_grad_()
    before = generator_state(device)
    with Tape():
        assert swapped(nn.Dropout(0.3), "dropout", how).eval()(x) is x
    assert torch.equal(generator_state(device), before)


def test_dropout_without_gradients_is_stock(device, how):
    x = random(3, 8, device=device)
    torch.manual_seed(3)
    expected = dropout_reference(x, 0.5)
    torch.manual_seed(3)
    with Tape(), torch.no_grad():
        assert_same_bits(dropout(x, 0.5, how), expected)


def test_dropout_refuses_to_work_in_place():
    assert "inplace=True" in DROPOUT.check(nn.Dropout(0.1, inplace=True), {})


def test_dropout_accepts_stock_modules():
    assert DROPOUT.check(nn.Dropout(0.1), {}) is None
