"""Every layer of selective differentiation against stock, to the bit, for each subset of wanted gradients."""

import pytest
import torch

from support.helpers import (
    DTYPES,
    as_function,
    assert_exact,
    only_on_cpu,
    random,
    subsets,
)
from support.selective import LAYERS

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'", "ignore:dropout2d")

#: A layer, and in train or in eval where that makes a difference.
MODES = [(n, training) for n, layer in LAYERS.items() for training in layer.modes]
#: The same, and which of input, weight and bias want gradients.
CASES = [(n, t, w) for n, t in MODES for w in subsets(1 + len(list(LAYERS[n].make().parameters())))]


def tensors(layer, stock, device, dtype):
    """The layer's input and parameters, all as separate tensors: each side of a comparison copies them."""
    return [random(*layer.shape, dtype=dtype, device=device), *(p.detach() for p in stock.parameters())]


def assert_same_buffers(mine, stock):
    assert [name for name, _ in mine.named_buffers()] == [name for name, _ in stock.named_buffers()]
    for got, expected in zip(mine.buffers(), stock.buffers(), strict=True):
        assert torch.equal(got, expected)


def assert_layer_is_exact(name, device, dtype, training, wanted):
    layer = LAYERS[name]
    stock, ours = layer.pair(device, dtype, training)
    assert_exact(as_function(ours), as_function(stock), tensors(layer, stock, device, dtype), wanted=wanted)
    assert_same_buffers(ours, stock)


@pytest.mark.parametrize("name, training, wanted", CASES, ids=str)
def test_a_layer_is_exact_for_every_subset_of_wanted_gradients(device, name, training, wanted):
    only_on_cpu(device)
    assert_layer_is_exact(name, device, torch.float32, training, wanted)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name, training", MODES, ids=str)
def test_a_layer_is_exact_in_every_dtype_whether_trained_or_frozen(device, name, training, dtype):
    only_on_cpu(device)
    if name == "AvgPool3d" and dtype in (torch.bfloat16, torch.float16) and device.type == "cpu":
        pytest.skip("stock has no kernel")
    count = len(list(LAYERS[name].make().parameters()))
    for wanted in {(True,) * (count + 1), (True,) + (False,) * count}:
        assert_layer_is_exact(name, device, dtype, training, wanted)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize(
    "name", [name for name, layer in LAYERS.items() if len(layer.shape) > 3 and "unbatched" not in name]
)
def test_a_layer_is_exact_in_channels_last(device, name, frozen):
    only_on_cpu(device)
    layer = LAYERS[name]
    stock, ours = layer.pair(device, torch.float32, training=False)
    inputs = tensors(layer, stock, device, torch.float32)
    last = torch.channels_last if len(layer.shape) == 4 else torch.channels_last_3d

    def reordered(module):
        return lambda x, *parameters: as_function(module)(x.contiguous(memory_format=last), *parameters)

    wanted = [True, *[not frozen] * (len(inputs) - 1)]
    assert_exact(reordered(ours), reordered(stock), inputs, wanted=wanted)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_exact_under_autocast(device, name, frozen):
    only_on_cpu(device)
    layer = LAYERS[name]
    stock, ours = layer.pair(device, torch.float32)
    inputs = tensors(layer, stock, device, torch.float32)
    wanted = [True, *[not frozen] * (len(inputs) - 1)]
    assert_exact(as_function(ours), as_function(stock), inputs, wanted=wanted, autocast=torch.bfloat16)


@pytest.mark.parametrize("name", ["Conv2d-zeros", "MaxPool2d", "AvgPool2d", "Dropout2d", "ReLU", "ReLU6"])
def test_a_layer_is_exact_for_an_empty_batch(device, name):
    only_on_cpu(device)
    stock, ours = LAYERS[name].pair(device, torch.float32)
    for module in (stock, ours):
        module.requires_grad_(False)
    assert_exact(ours, stock, [random(0, *LAYERS[name].shape[1:], device=device)])


@pytest.mark.parametrize("name", ["ReLU", "ReLU6", "LeakyReLU", "Hardtanh", "Threshold"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rectifier_is_exact_for_numbers_at_and_beyond_its_bounds(device, name, dtype):
    only_on_cpu(device)
    edges = [0.0, -0.0, 1e-45, -1e-45, 6.0, 0.1, 0.7, -0.3, 1.0, torch.inf, -torch.inf, torch.nan, 65504.0, 6.01, -1, 5]
    stock, ours = LAYERS[name].pair(device, dtype)
    assert_exact(ours, stock, [torch.tensor(edges * 4, dtype=dtype, device=device)])
