"""What the layers of selective differentiation keep under a tape: what they claim, and never more than stock."""

import pytest
import torch
from torch import nn

from hf_memsave import measure_kept
from support.helpers import kept, random
from support.selective import LAYERS, Taped

SHAPE = (2, 4, 12, 12)
CHANNELS, N = 4, 2 * 4 * 12 * 12
PADDED = 2 * 4 * 14 * 14
VECTOR = 4 * CHANNELS  # of fp32: a statistic, a weight or a bias


def both(name, device, dtype=torch.float32, training=True, frozen=True, linear=False, producer=torch.clone):
    """Bytes that the layer keeps of an input of SHAPE, stock and ours; ``linear``: with a trained one after it."""
    layer = LAYERS[name].make().to(device, dtype).train(training).requires_grad_(not frozen)
    x = random(*SHAPE, dtype=dtype, device=device)
    return tuple(kept(layer, x, tape, producer, linear) for tape in (False, True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["Conv2d-zeros", "ConvTranspose2d", "Conv2d-reflect", "Conv2d-replicate"])
def test_a_convolution_keeps_its_input_unpadded_where_its_weight_wants_a_gradient(device, name, dtype):
    stock = (N + (PADDED if name in ("Conv2d-reflect", "Conv2d-replicate") else 0)) * dtype.itemsize
    assert both(name, device, dtype, frozen=True) == (stock, 0)
    assert both(name, device, dtype, frozen=False) == (stock, N * dtype.itemsize)


def test_a_batch_norm_that_keeps_its_input_keeps_no_output(device):
    """Beyond its input: in training the batch's mean and 1/std; and copies of its weight and bias."""
    for training, frozen in ((True, True), (True, False), (False, False)):
        statistics, copies = 2 * VECTOR if training else 0, 2 * VECTOR
        stock, here = both("BatchNorm2d", device, training=training, frozen=frozen, linear=True)
        assert (stock, here) == (2 * N * 4 + statistics, N * 4 + statistics + copies)


def test_a_rectifier_of_a_batch_norm_keeps_nothing_beside_the_norms_input(device):
    """Its side is had from that and copies of the norm's weight and bias: 8 bytes a channel, where bits take 36."""
    layer = nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.ReLU6()).to(device)
    assert kept(layer, random(*SHAPE, device=device), True, linear=False) == N * 4 + 2 * VECTOR + 2 * VECTOR


def test_each_layer_keeps_what_it_claims(device):
    """A frozen batch norm, a group norm, pools and a channel dropout."""
    assert both("BatchNorm2d", device, training=False) == (N * 4, 0)
    assert both("BatchNorm2d", device, training=False, linear=True)[1] <= N * 4
    statistics = 2 * 2 * 2 * 4
    assert both("GroupNorm", device, linear=True) == (2 * N * 4 + statistics, N * 4 + statistics + 2 * VECTOR)
    for name in ("AvgPool2d", "AdaptiveAvgPool2d"):
        assert both(name, device) == (N * 4, 0)
    assert both("MaxPool2d", device) == (N * 4 + N // 4 * 8, N // 4)  # a byte for each output
    noise = 2 * VECTOR
    stock, here = both("Dropout2d", device, linear=True, producer=torch.sigmoid)  # which keeps the input
    assert (stock, here) == (2 * N * 4 + noise, N * 4 + noise)


def conv(**options):
    return nn.Conv2d(4, 4, 3, padding=1, **options)


#: Chains of layers, in which consumers share what stock keeps.
CHAINS = {
    "norm": lambda: [conv(), nn.BatchNorm2d(4), nn.ReLU(), conv()],
    "norm-inplace": lambda: [conv(), nn.BatchNorm2d(4), nn.ReLU(inplace=True), conv()],
    "norm-dropout": lambda: [conv(), nn.BatchNorm2d(4), nn.Dropout2d(), nn.ReLU6(), conv()],
    "relu": lambda: [conv(padding_mode="reflect"), nn.ReLU(), nn.MaxPool2d(2), conv()],
    "relu-dropout": lambda: [conv(), nn.ReLU(), nn.Dropout2d(), conv()],
    "relu-relu": lambda: [conv(), nn.ReLU(), nn.ReLU(), conv()],
    "leaky": lambda: [conv(padding_mode="circular"), nn.LeakyReLU(), conv(), nn.AvgPool2d(2)],
    "first": lambda: [nn.ReLU6(), conv(), nn.GroupNorm(2, 4), nn.Hardtanh(), nn.ConvTranspose2d(4, 4, 3)],
}


@pytest.mark.parametrize("wanted", ["all", "input", "norms", "last"])
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_never_keeps_more_than_stock(device, name, wanted):
    layers = CHAINS[name]()
    for index, layer in enumerate(layers):
        is_norm = isinstance(layer, (nn.BatchNorm2d, nn.GroupNorm))
        layer.requires_grad_({"all": True, "input": False, "norms": is_norm}.get(wanted, index == len(layers) - 1))
    model = nn.Sequential(*layers).to(device)
    for training, shape in ((True, SHAPE), (False, SHAPE), (True, (1, 4, 2, 2))):
        x = random(*shape, device=device).requires_grad_(wanted == "input")
        eager, here = (measure_kept(Taped(model.train(training), tape), x).total for tape in (False, True))
        assert here <= eager
        if wanted == "input" and shape == SHAPE:
            assert here < 0.67 * eager
