"""What the layers of selective differentiation keep: what they claim, and never more than stock."""

import copy

import pytest
import torch
from torch import nn

from hf_memsave import measure_kept
from hf_memsave.ops import batch_norm, channel_dropout, convolution, group_norm, pooling, rectifier
from support.helpers import kept, nbytes, random
from support.selective import LAYERS, Taped, swap_all

SHAPE = (2, 4, 12, 12)
N = 2 * 4 * 12 * 12


def both(name, device, dtype=torch.float32, training=True, frozen=True, linear=False):
    """Bytes that the layer keeps of an input of SHAPE, stock and ours; ``linear``: with a trained one after it."""
    stock, ours = (m.requires_grad_(not frozen) for m in LAYERS[name].pair(device, dtype, training))
    x = random(*SHAPE, dtype=dtype, device=device)
    return kept(stock, x, tape=False, linear=linear), kept(ours, x, tape=True, linear=linear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
@pytest.mark.parametrize("name", ["Conv2d-zeros", "Conv2d-reflect", "Conv2d-replicate", "ConvTranspose2d"])
def test_a_convolution_keeps_what_it_claims(device, name, frozen, dtype):
    padded = (2, 4, 14, 14) if name in ("Conv2d-reflect", "Conv2d-replicate") else None
    claim = convolution.kept_bytes(SHAPE, dtype.itemsize, frozen, padded)
    assert both(name, device, dtype, frozen=frozen) == claim


@pytest.mark.parametrize("training, frozen", [(True, True), (True, False), (False, False)], ids=str)
def test_a_batch_norm_that_keeps_its_input_keeps_what_it_claims(device, training, frozen):
    claim = batch_norm.kept_bytes(SHAPE, 4, training, frozen)
    eager, here = both("BatchNorm2d", device, training=training, frozen=frozen, linear=True)
    private_copies = (2 if training else 4) * nbytes(torch.empty(4))
    assert (eager, here) == (claim.eager, claim.here + private_copies)


def test_a_frozen_batch_norm_in_eval_keeps_nothing(device):
    assert both("BatchNorm2d", device, training=False) == (N * 4, 0)
    assert both("BatchNorm2d", device, training=False, linear=True) == batch_norm.kept_bytes(SHAPE, 4, False, True)


def test_a_group_norm_keeps_what_it_claims(device):
    claim = group_norm.kept_bytes(SHAPE, 2, 4)
    eager, here = both("GroupNorm", device, linear=True)
    assert (eager, here) == (claim.eager, claim.here + 2 * nbytes(torch.empty(4)))


@pytest.mark.parametrize("name", ["AvgPool2d", "AdaptiveAvgPool2d"])
def test_an_average_pool_keeps_nothing(device, name):
    assert both(name, device) == pooling.kept_bytes(N, 4)


def test_a_max_pool_keeps_a_byte_for_each_output(device):
    assert both("MaxPool2d", device) == pooling.kept_bytes(N, 4, N // 4, 4)


def test_a_channel_dropout_keeps_its_noise(device):
    stock, ours = LAYERS["Dropout2d"].pair(device, torch.float32)
    claim, x = channel_dropout.kept_bytes(SHAPE, 4), random(*SHAPE, device=device)
    eager, here = (kept(m, x, tape, torch.sigmoid) for m, tape in ((stock, False), (ours, True)))
    assert (eager - N * 4, here - N * 4) == claim  # sigmoid keeps the input


@pytest.mark.parametrize("name", ["ReLU", "ReLU6", "LeakyReLU", "Hardtanh", "Threshold", "ReLU-inplace"])
def test_a_rectifier_keeps_what_it_claims(device, name):
    assert both(name, device) == rectifier.kept_bytes(SHAPE, 4)


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


@pytest.mark.parametrize("shape", [SHAPE, (1, 4, 2, 2)], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("wanted", ["all", "input", "norms", "last"])
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_never_keeps_more_than_stock(device, name, wanted, training, shape):
    layers = CHAINS[name]()
    for index, layer in enumerate(layers):
        is_norm = isinstance(layer, (nn.BatchNorm2d, nn.GroupNorm))
        layer.requires_grad_({"all": True, "input": False, "norms": is_norm}.get(wanted, index == len(layers) - 1))
    stock = nn.Sequential(*layers).to(device).train(training)
    ours = swap_all(copy.deepcopy(stock))
    x = random(*shape, device=device).requires_grad_(wanted == "input")
    eager, here = (measure_kept(Taped(m, tape), x).total for m, tape in ((stock, False), (ours, True)))
    assert here <= eager
    if wanted == "input" and shape == SHAPE:
        assert here < 0.67 * eager
