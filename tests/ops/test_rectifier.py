"""``rectifier`` as ReLU: stock's bits from one bit an element, or from the output where another op keeps that."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_memsave import measure_kept
from hf_memsave.ops.rectifier import kept_bytes
from hf_memsave.tape import Tape
from support.helpers import (
    DTYPES,
    LAYOUTS,
    Probe,
    assert_backward_twice,
    assert_exact,
    assert_gradients_are_right,
    assert_same_bits,
    kept,
    nbytes,
    random,
    swapped,
)


@pytest.fixture
def relu():
    return swapped(nn.ReLU(), "rectifier")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 5), (0, 4)], ids=str)
def test_relu_is_exact(device, relu, shape, dtype):
    assert_exact(relu, torch.relu, [random(*shape, dtype=dtype, device=device)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_relu_of_a_view_is_exact(device, relu, layout):
    view = LAYOUTS[layout]
    assert_exact(lambda x: relu(view(x)), lambda x: torch.relu(view(x)), [random(3, 8, 5, device=device)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_relu_of_special_values_is_exact(device, relu, dtype):
    values = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-45, -1e-45, 6e-8, 1.0, -1.0]
    x = torch.tensor(values, dtype=dtype, device=device)
    gradients = []
    for op, tape in ((relu, Tape()), (torch.relu, torch.enable_grad())):
        leaf = x.clone().requires_grad_()
        with tape:
            y = op(leaf * 1)
        y.backward(torch.arange(1, len(values) + 1, device=device).to(dtype))
        gradients.append(leaf.grad)
        assert_same_bits(y, torch.relu(x), "output")
    assert_same_bits(*gradients, "gradient")
    assert gradients[0][4] == 5, "a NaN passes the gradient on, as in stock"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 5), (16, 64)], ids=str)
def test_relu_keeps_a_bit_an_element(device, relu, shape, dtype):
    x, claim = random(*shape, dtype=dtype, device=device), kept_bytes(shape, dtype.itemsize)
    assert kept(torch.relu, x, tape=False, linear=False) == claim.eager == nbytes(x)
    assert kept(relu, x, tape=True, linear=False) == claim.here == -(-x.numel() // 8)


def test_relu_shares_what_the_next_linear_keeps(device, relu):
    x = random(16, 64, device=device)
    assert kept(relu, x, tape=True) == kept(torch.relu, x, tape=False) == nbytes(x)


def test_relu_keeps_bits_beside_a_frozen_linear(device, relu):
    x = random(16, 64, device=device)
    frozen = nn.Linear(64, 2, device=device).requires_grad_(False)
    found = measure_kept(Probe(relu, True, torch.clone, frozen, None), x.requires_grad_())
    assert found.total - 4 == x.numel() // 8  # 4 bytes of loss


def test_relu_beside_a_linear_gives_stocks_gradients(device, relu):
    torch.manual_seed(0)
    linears = nn.Linear(8, 6).to(device), nn.Linear(6, 3).to(device)
    found = []
    for op, tape in ((relu, Tape()), (torch.relu, torch.enable_grad())):
        x = random(5, 8, device=device).requires_grad_()
        with tape:
            loss = linears[1](op(linears[0](x))).square().sum()
        found.append(torch.autograd.grad(loss, [x, *linears[0].parameters(), *linears[1].parameters()]))
    for mine, stock in zip(*found, strict=True):
        assert_same_bits(mine, stock)


def test_a_change_of_the_output_is_of_no_matter_to_its_bits(device, relu):
    x = random(5, 8, device=device).requires_grad_()
    with Tape():
        y = relu(x * 1)
        y.mul_(2)  # where stock raises
    y.sum().backward()
    assert_same_bits(x.grad, 2.0 * (x > 0))


def test_an_output_kept_whole_and_changed_raises(device, relu):
    x, linear = random(5, 8, device=device).requires_grad_(), nn.Linear(8, 2, device=device)
    with Tape():
        y = relu(x * 1)
        loss = linear(y).sum()
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_relu_in_a_checkpoint_is_exact(device, relu, use_reentrant):
    linear = nn.Linear(8, 8, device=device)

    def block(x, op):
        with Tape():
            return linear(op(linear(x)))

    found = []
    for op, again in ((relu, True), (torch.relu, False)):
        x = random(5, 8, device=device).requires_grad_()
        y = checkpoint(block, x, op, use_reentrant=use_reentrant) if again else linear(op(linear(x)))
        y.square().sum().backward()
        found.append([x.grad, *(p.grad.clone() for p in linear.parameters())])
        linear.zero_grad()
    for mine, stock in zip(*found, strict=True):
        assert_same_bits(mine, stock)


def test_relu_gradients_are_right_once_and_twice(device, relu):
    assert_gradients_are_right(relu, random(3, 4, dtype=torch.float64, device=device))


def test_relu_backward_twice_gives_the_same_bits(device, relu):
    assert_backward_twice(relu, random(3, 4, device=device))


def test_relu_in_place_stays_stock(device):
    op = swapped(nn.ReLU(inplace=True), "rectifier")
    x = random(3, 4, device=device).requires_grad_()
    with Tape():
        z = x * 1
        assert op(z) is z
    z.sum().backward()
    assert_same_bits(x.grad, (x > 0).float())


def test_relu_without_a_tape_is_stock(device, relu):
    x = random(3, 4, device=device).requires_grad_()
    relu(x).sum().backward()
    assert_same_bits(x.grad, (x > 0).float())
