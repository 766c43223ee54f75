"""Second derivatives and second backwards of the layers of selective differentiation."""

from functools import partial

import pytest
import torch

from support.helpers import as_function, assert_backward_twice, assert_gradients_are_right, random
from support.selective import LAYERS

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")

ONE_OF_EACH = [
    "Conv1d-zeros", "Conv2d-reflect", "Conv2d-same", "Conv2d-strided", "Conv3d-zeros", "ConvTranspose1d",
    "ConvTranspose2d-nobias", "BatchNorm2d", "BatchNorm1d-plain", "MaxPool2d", "MaxPool3d", "AvgPool2d",
    "AdaptiveAvgPool2d", "Dropout2d", "ReLU", "ReLU6", "LeakyReLU", "Hardtanh", "Threshold", "ReLU-inplace",
]  # fmt: skip


def in_float64(name, device):
    """The layer running our op, a small input, and how to call it with the same random numbers each time."""
    layer = LAYERS[name]
    _, ours = layer.pair(device, torch.float64, training=layer.op == "channel_dropout")
    small = [min(size, 3 if len(layer.shape) < 5 else 2) for size in layer.shape[2:]]
    x = random(1, layer.shape[1], *small, dtype=torch.float64, device=device)

    def call(function, *inputs):
        torch.manual_seed(0)
        return function(inputs[0] * 1, *inputs[1:])

    return ours, x, call


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_frozen_layer_has_the_right_second_derivatives(device, name):
    ours, x, call = in_float64(name, device)
    ours.requires_grad_(False)
    assert_gradients_are_right(partial(call, ours), x)


@pytest.mark.parametrize("name", ["Conv1d-reflect", "ConvTranspose1d", "BatchNorm1d"])
def test_a_trained_layer_has_the_right_second_derivatives(device, name):
    ours, x, call = in_float64(name, device)
    x = torch.cat([x, x.flip(-1)])  # a batch of two
    assert_gradients_are_right(partial(call, as_function(ours)), x, *(p.detach() for p in ours.parameters()))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_frozen_layer_runs_backward_twice(device, name):
    ours, x, call = in_float64(name, device)
    assert_backward_twice(partial(call, ours.requires_grad_(False)), x)
