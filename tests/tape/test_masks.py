"""A mask is one bit an element; it gives way to the tensor it stands for where that is kept anyway."""

import pytest
from torch import nn

from hf_memsave import KeptTensorChangedError, measure_kept
from hf_memsave.tape import Tape
from support.helpers import assert_same_bits, random, swapped
from support.selective import LAYERS, Taped, swap_all


def kept(device, trained, patched, relu="ReLU"):
    """Bytes that a convolution, a rectifier and a convolution keep, the last one trained or frozen."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), LAYERS[relu].make(), nn.Conv2d(8, 2, 3).requires_grad_(trained))
    model = swap_all(model) if patched else model
    return measure_kept(Taped(model, patched).to(device), random(2, 3, 10, 10, device=device)).total


ELEMENTS = 2 * 8 * 8 * 8


def test_the_output_of_a_relu_is_a_bit_an_element_before_a_frozen_layer(device):
    assert kept(device, False, True) == kept(device, False, False) - ELEMENTS * 4 + ELEMENTS // 8


@pytest.mark.parametrize("relu", ["ReLU", "ReLU-inplace"])
def test_a_relu_before_a_trained_layer_shares_its_output_as_in_stock(device, relu):
    assert kept(device, True, True, relu) == kept(device, True, False, relu)


@pytest.mark.parametrize("name", ["ReLU6", "LeakyReLU", "Hardtanh", "Threshold"])
def test_a_rectifier_before_a_trained_layer_keeps_a_bit_instead_of_its_input(device, name):
    assert kept(device, True, True, name) == kept(device, True, False, name) - ELEMENTS * 4 + ELEMENTS // 8


def test_a_mask_gives_way_to_what_was_kept_before_it(device):
    x = random(3, 40, device=device).requires_grad_()
    relu6 = swapped(nn.ReLU6(), "rectifier")
    with Tape() as tape:
        h = x * 1
        square = h.square()  # keeps h
        y = relu6(h)
    assert y.grad_fn._saved_self.data_ptr() == h.data_ptr()
    assert tape is not None and square is not None


def test_a_mask_stays_right_when_its_tensor_is_written_to(device):
    x = random(3, 40, device=device).requires_grad_()
    with Tape():
        y = swapped(nn.ReLU(), "rectifier")(x * 1)
        y.mul_(-1)
        z = y.square()  # keeps another y than the one the mask stands for
    z.sum().backward()
    assert_same_bits(x.grad, 2 * x.detach().clamp_min(0))


def test_a_mask_that_gave_way_sees_a_later_write_as_stock_does(device):
    x = random(3, 40, device=device).requires_grad_()
    with Tape():
        y = swapped(nn.ReLU(), "rectifier")(x * 1)
        loss = y.square().sum()
    y.detach().mul_(2)
    with pytest.raises(KeptTensorChangedError):
        loss.backward()
