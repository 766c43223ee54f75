"""What the layers of selective differentiation keep under a tape: what they claim, and never more than stock.

A rectifier keeps one bit an element, which gives way to the tensor it stands for where that is kept.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_memsave import KeptTensorChangedError, measure_kept
from hf_memsave.count.peak import Count
from hf_memsave.tape.selective import Windows
from support.helpers import DTYPES, Probe, assert_same_bits, kept, random, taping
from support.selective import LAYERS, RECTIFIERS, Taped

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


def test_each_layer_keeps_what_it_claims(device):
    """A batch norm its input, in training the batch's mean and 1/std, and copies of its weight and bias."""
    for training, frozen in ((True, True), (True, False), (False, False)):
        statistics, copies = 2 * VECTOR if training else 0, 2 * VECTOR
        stock, here = both("BatchNorm2d", device, training=training, frozen=frozen, linear=True)
        assert (stock, here) == (2 * N * 4 + statistics, N * 4 + statistics + copies)
    assert both("BatchNorm2d", device, training=False) == (N * 4, 0)
    assert both("BatchNorm2d", device, training=False, linear=True)[1] <= N * 4
    # Its rectifier's side is had from that: 8 bytes a channel, where bits take 36.
    layer = nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.ReLU6()).to(device)
    assert kept(layer, random(*SHAPE, device=device), True, linear=False) == N * 4 + 2 * VECTOR + 2 * VECTOR
    statistics = 2 * 2 * 2 * 4
    assert both("GroupNorm", device, linear=True) == (2 * N * 4 + statistics, N * 4 + statistics + 2 * VECTOR)
    for name in ("AvgPool2d", "AdaptiveAvgPool2d"):
        assert both(name, device) == (N * 4, 0)
    assert both("MaxPool2d", device) == (N * 4 + N // 4 * 8, N // 4)  # a byte for each output
    noise = 2 * VECTOR
    stock, here = both("Dropout2d", device, linear=True, producer=torch.sigmoid)  # which keeps the input
    assert (stock, here) == (2 * N * 4 + noise, N * 4 + noise)


def test_places_are_made_of_parts_of_the_indices(device):
    indices = F.max_pool2d(random(32, 4, 24, 24, device=device), 2, return_indices=True)[1]
    with Count() as count:
        places = Windows((24, 24), (2, 2), (2, 2), (0, 0), (1, 1)).places(indices)
    assert places.shape == indices.shape and count.peak <= places.nbytes + indices.nbytes  # at once: four of its size


def conv(**options):
    return nn.Conv2d(4, 4, 3, padding=1, **options)


#: Chains of layers, in which consumers share what stock keeps; those of CNNs have a test of their own.
CHAINS = {
    "norm-dropout": lambda: [conv(), nn.BatchNorm2d(4), nn.Dropout2d(), nn.ReLU6(), conv()],
    "relu": lambda: [conv(padding_mode="reflect"), nn.ReLU(), nn.ReLU(), nn.MaxPool2d(2), conv()],
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


@pytest.mark.parametrize("name", RECTIFIERS)
def test_a_rectifier_keeps_a_bit_an_element_and_nothing_where_its_input_is_kept(device, name):
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


def test_a_rectifier_between_convolutions_keeps_one_tensor_or_a_bit_an_element(device):
    """Before a trained one a ReLU its output, as in stock; else its input, of which that is made, or that and bits."""

    def saved(name, trained):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), LAYERS[name].make(), nn.Conv2d(8, 2, 3).requires_grad_(trained))
        x = random(2, 3, 10, 10, device=device)
        stock, here = (measure_kept(Taped(model, tape).to(device), x).total for tape in (False, True))
        return stock - here

    elements = 2 * 8 * 8 * 8
    assert saved("ReLU", False) == elements * 4 - elements // 8
    assert saved("ReLU", True) == saved("ReLU-inplace", True) == 0
    assert all(saved(name, True) >= elements * 4 - elements // 8 for name in RECTIFIERS if name != "ReLU")


def test_bits_give_way_to_what_was_kept_before_them_or_is_after_them(device):
    x = random(3, 40, device=device).requires_grad_()
    with taping():
        h = torch.ops.aten.clone(x)
        y = F.relu6(h)
        square = torch.ops.aten.square(h)  # keeps h
        z = F.relu6(h)
    assert y.grad_fn._saved_self.data_ptr() == z.grad_fn._saved_self.data_ptr() == h.data_ptr()
    (y + square).sum().backward()
    assert_same_bits(x.grad, 2 * x.detach() + ((x > 0) & (x < 6)).float())


def test_bits_stay_right_when_their_tensor_is_written_to(device):
    x = random(3, 40, device=device).requires_grad_()
    with taping():
        y = F.relu(x * 1)
        y.mul_(-1)
        z = y.square()  # keeps another y than the one the mask stands for
    z.sum().backward()
    assert_same_bits(x.grad, 2 * x.detach().clamp_min(0))
    with taping():
        for name in RECTIFIERS:
            z = x * 1
            assert LAYERS[f"{name}-inplace"].make()(z) is z


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
