"""Rectifiers under a tape: one bit an element, which gives way to the tensor it stands for where that is kept."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_memsave import KeptTensorChangedError, measure_kept
from support.helpers import DTYPES, Probe, assert_same_bits, kept, random, taping
from support.selective import LAYERS, Taped

NAMES = ("ReLU", "ReLU6", "LeakyReLU", "Hardtanh", "Threshold")
ELEMENTS = 2 * 8 * 8 * 8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_relu_of_special_values_is_exact(device, dtype):
    values = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-45, -1e-45, 6e-8, 1.0, -1.0]
    x = torch.tensor(values, dtype=dtype, device=device)
    gradients = []
    for tape in (taping(), contextlib.nullcontext()):
        leaf = x.clone().requires_grad_()
        with tape:
            y = torch.relu(leaf * 1)
        y.backward(torch.arange(1, len(values) + 1, device=device).to(dtype))
        gradients.append(leaf.grad)
        assert_same_bits(y, torch.relu(x), "output")
    assert_same_bits(*gradients, "gradient")
    assert gradients[0][4] == 5, "a NaN passes the gradient on, as in stock"


# What is kept.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 5), (16, 64)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_it_keeps_a_bit_an_element(device, name, shape, dtype):
    x, module = random(*shape, dtype=dtype, device=device), LAYERS[name].make()
    assert kept(module, x, tape=False, linear=False) == x.nbytes
    assert kept(module, x, tape=True, linear=False) == -(-x.numel() // 8)


def test_relu_shares_what_the_next_linear_keeps(device):
    x = random(16, 64, device=device)
    assert kept(F.relu, x, tape=True) == kept(F.relu, x, tape=False) == x.nbytes


@pytest.mark.parametrize("name", NAMES)
def test_it_keeps_bits_beside_a_frozen_linear(device, name):
    x = random(16, 64, device=device)
    frozen = nn.Linear(64, 2, device=device).requires_grad_(False)
    found = measure_kept(Probe(LAYERS[name].make(), True, torch.clone, frozen, None), x.requires_grad_())
    assert found.total - 4 == x.numel() // 8  # 4 bytes of loss


@pytest.mark.parametrize("name", NAMES)
def test_it_keeps_nothing_where_its_input_is_kept(device, name):
    x = random(16, 64, device=device)
    assert kept(LAYERS[name].make(), x, tape=True, producer=torch.sigmoid) == x.nbytes


def between_convolutions(device, trained, tape, name="ReLU"):
    """Bytes that a convolution, a rectifier and a convolution keep, the last one trained or frozen."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), LAYERS[name].make(), nn.Conv2d(8, 2, 3).requires_grad_(trained))
    return measure_kept(Taped(model, tape).to(device), random(2, 3, 10, 10, device=device)).total


def test_the_output_of_a_relu_is_a_bit_an_element_before_a_frozen_layer(device):
    stock = between_convolutions(device, False, False)
    assert between_convolutions(device, False, True) == stock - ELEMENTS * 4 + ELEMENTS // 8


@pytest.mark.parametrize("name", ["ReLU", "ReLU-inplace"])
def test_a_relu_before_a_trained_layer_shares_its_output_as_in_stock(device, name):
    assert between_convolutions(device, True, True, name) == between_convolutions(device, True, False, name)


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_rectifier_before_a_trained_layer_keeps_one_tensor(device, name):
    """Its input, of which its output is made again; or its output and a bit an element."""
    stock = between_convolutions(device, True, False, name)
    assert between_convolutions(device, True, True, name) <= stock - ELEMENTS * 4 + ELEMENTS // 8


def test_a_mask_gives_way_to_what_was_kept_before_it(device):
    x = random(3, 40, device=device).requires_grad_()
    with taping():
        h = x * 1
        square = h.square()  # keeps h
        y = F.relu6(h)
    assert y.grad_fn._saved_self.data_ptr() == h.data_ptr()
    assert square is not None


def test_a_mask_gives_way_to_what_is_kept_after_it(device):
    x = random(3, 40, device=device).requires_grad_()
    with taping():
        h = torch.ops.aten.clone(x)
        y = F.relu6(h)
        square = torch.ops.aten.square(h)  # keeps h
    assert y.grad_fn._saved_self.data_ptr() == h.data_ptr()
    (y + square).sum().backward()
    assert_same_bits(x.grad, 2 * x.detach() + ((x > 0) & (x < 6)).float())


# What is written to.


def test_a_mask_stays_right_when_its_tensor_is_written_to(device):
    x = random(3, 40, device=device).requires_grad_()
    with taping():
        y = F.relu(x * 1)
        y.mul_(-1)
        z = y.square()  # keeps another y than the one the mask stands for
    z.sum().backward()
    assert_same_bits(x.grad, 2 * x.detach().clamp_min(0))


def test_a_change_of_the_output_is_of_no_matter_to_its_bits(device):
    x = random(5, 8, device=device).requires_grad_()
    with taping():
        y = F.relu(x * 1)
        y.mul_(2)  # where stock raises
    y.sum().backward()
    assert_same_bits(x.grad, 2.0 * (x > 0))


@pytest.mark.parametrize("when", ["inside", "after"])
def test_a_mask_that_gave_way_sees_a_later_write_as_stock_does(device, when):
    x = random(3, 40, device=device).requires_grad_()
    with taping():
        y = F.relu(torch.ops.aten.clone(x))
        loss = torch.ops.aten.square(y).sum()
        if when == "inside":
            y.detach().mul_(2)
    if when == "after":
        y.detach().mul_(2)
    with pytest.raises(KeptTensorChangedError):
        loss.backward()


def test_in_place_it_stays_in_place(device):
    x = random(3, 4, device=device).requires_grad_()
    for name in NAMES:
        with taping():
            z = x * 1
            assert LAYERS[f"{name}-inplace"].make()(z) is z


# Beside others.


@pytest.mark.parametrize("name", NAMES)
def test_beside_a_linear_gradients_are_stocks(device, name):
    module, linears = LAYERS[name].make(), (nn.Linear(8, 6).to(device), nn.Linear(6, 3).to(device))
    found = []
    for tape in (taping(), contextlib.nullcontext()):
        x = random(5, 8, device=device).requires_grad_()
        with tape:
            loss = linears[1](module(linears[0](x))).square().sum()
        found.append(torch.autograd.grad(loss, [x, *linears[0].parameters(), *linears[1].parameters()]))
    for mine, stock in zip(*found, strict=True):
        assert_same_bits(mine, stock)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_in_a_checkpoint_it_is_exact(device, name, use_reentrant):
    linear, module = nn.Linear(8, 8, device=device), LAYERS[name].make()

    def block(x):
        with taping():
            return linear(module(linear(x)))

    found = []
    for again in (True, False):
        x = random(5, 8, device=device).requires_grad_()
        y = checkpoint(block, x, use_reentrant=use_reentrant) if again else linear(module(linear(x)))
        y.square().sum().backward()
        found.append([x.grad, *(p.grad.clone() for p in linear.parameters())])
        linear.zero_grad()
    for mine, stock in zip(*found, strict=True):
        assert_same_bits(mine, stock)
