"""Rectifiers under a tape: one bit an element, which gives way to the tensor it stands for where that is kept."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_memsave import KeptTensorChangedError, measure_kept
from support.helpers import DTYPES, Probe, assert_same_bits, kept, laid, random, taping
from support.selective import LAYERS, Taped

NAMES = ("ReLU", "ReLU6", "LeakyReLU", "Hardtanh", "Threshold")
ELEMENTS = 2 * 8 * 8 * 8


@pytest.mark.parametrize("name", NAMES)
def test_it_keeps_a_bit_an_element_and_nothing_where_its_input_is_kept(device, name):
    module = LAYERS[name].make()
    for dtype, shape in zip(DTYPES, [(2, 3, 5), (16, 64)] * 2, strict=True):
        x = random(*shape, dtype=dtype, device=device)
        assert kept(module, x, tape=False, linear=False) == x.nbytes
        assert kept(module, x, tape=True, linear=False) == -(-x.numel() // 8)
    x = random(16, 64, device=device)
    assert kept(module, x, tape=True, producer=torch.sigmoid) == x.nbytes
    frozen = nn.Linear(64, 2, device=device).requires_grad_(False)
    found = measure_kept(Probe(module, True, torch.clone, frozen, None), x.requires_grad_())
    assert found.total - 4 == x.numel() // 8  # 4 bytes of loss


def test_relu_shares_what_the_next_linear_keeps(device):
    x = random(16, 64, device=device)
    assert kept(F.relu, x, tape=True) == kept(F.relu, x, tape=False) == x.nbytes


def between_convolutions(device, trained, tape, name="ReLU"):
    """Bytes that a convolution, a rectifier and a convolution keep, the last one trained or frozen."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), LAYERS[name].make(), nn.Conv2d(8, 2, 3).requires_grad_(trained))
    return measure_kept(Taped(model, tape).to(device), random(2, 3, 10, 10, device=device)).total


def test_the_output_of_a_relu_is_a_bit_an_element_before_a_frozen_layer(device):
    stock = between_convolutions(device, False, False)
    assert between_convolutions(device, False, True) == stock - ELEMENTS * 4 + ELEMENTS // 8


def test_a_rectifier_before_a_trained_layer_keeps_one_tensor(device):
    """A ReLU its output, as in stock; else its input, of which its output is made, or that and a bit an element."""
    for name in ("ReLU", "ReLU-inplace"):
        assert between_convolutions(device, True, True, name) == between_convolutions(device, True, False, name)
    for name in NAMES[1:]:
        stock = between_convolutions(device, True, False, name)
        assert between_convolutions(device, True, True, name) <= stock - ELEMENTS * 4 + ELEMENTS // 8


def test_a_mask_gives_way_to_what_was_kept_before_it_or_is_after_it(device):
    x = random(3, 40, device=device).requires_grad_()
    with taping():
        h = torch.ops.aten.clone(x)
        y = F.relu6(h)
        square = torch.ops.aten.square(h)  # keeps h
        z = F.relu6(h)
    assert y.grad_fn._saved_self.data_ptr() == z.grad_fn._saved_self.data_ptr() == h.data_ptr()
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


def test_a_change_of_the_output_is_of_no_matter_to_its_bits_but_where_they_gave_way(device):
    """Where stock raises."""
    x = random(5, 8, device=device).requires_grad_()
    with taping():
        y = F.relu(x * 1)
        y.mul_(2)
    y.sum().backward()
    assert_same_bits(x.grad, 2.0 * (x > 0))
    for is_inside in (True, False):
        with taping():
            y = F.relu(torch.ops.aten.clone(x))
            loss = torch.ops.aten.square(y).sum()
            if is_inside:
                y.detach().mul_(2)
        if not is_inside:
            y.detach().mul_(2)
        with pytest.raises(KeptTensorChangedError):
            loss.backward()


def test_in_place_it_stays_in_place(device):
    for name in NAMES:
        with taping():
            z = random(3, 4, device=device).requires_grad_() * 1
            assert LAYERS[f"{name}-inplace"].make()(z) is z


# Beside others.


@pytest.mark.parametrize("how", ["alone", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", NAMES)
def test_between_linears_and_in_a_checkpoint_it_is_exact(device, name, how):
    linear, module = nn.Linear(8, 8, device=device), LAYERS[name].make()
    found = []
    for tape in (True, False):

        def block(x, tape=tape):
            with laid(tape):
                return linear(module(linear(x)))

        x = random(5, 8, device=device).requires_grad_()
        y = checkpoint(block, x, use_reentrant=how == "reentrant") if tape and how != "alone" else block(x)
        y.square().sum().backward()
        found.append([x.grad, *(p.grad.clone() for p in linear.parameters())])
        linear.zero_grad()
    for mine, stock in zip(*found, strict=True):
        assert_same_bits(mine, stock)
