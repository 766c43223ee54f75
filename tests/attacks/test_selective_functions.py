"""Attacks on what is kept in a bit an element, and on the arguments of pools, paddings and lazy layers."""

import contextlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave import measure_kept, patch
from support.attacks import WIDTH, Attack, assert_trains_like_stock, kept_of, trained
from support.helpers import autocasting, only_on_cpu, random, taping
from support.steps import assert_same

SHAPE = (8, 64, WIDTH)
BOOLEANS = 8 * 64 * WIDTH


def on_images(layer):
    """A function whose model is a layer on images."""
    return lambda model, x: model.f(layer(x.unflatten(1, (4, 16)).transpose(2, 3)).flatten(1)[:, :WIDTH])


# Booleans beside what lives anyway


def masked(model, x):
    return torch.where(model.mask, model.f(x), 0.0)


def assert_keeps_no_more_than_stock(model, *batch):
    """At the first forward, and when an earlier one has seen all that lives on."""
    stock = measure_kept(model, batch).total
    patch(model)
    assert [measure_kept(model, batch).total for _ in range(2)] == [stock, stock]


def test_a_mask_that_is_a_plain_attribute_is_not_coded(device):
    model = Attack(masked).to(device)
    model.mask = random(*SHAPE, device=device) > 0
    assert_keeps_no_more_than_stock(model, random(*SHAPE, device=device))


PLACES = {
    "an argument": (lambda x, mask: (x, mask), lambda x, mask: (x, mask)),
    "a list": (lambda x, mask: (x, [mask]), lambda x, masks: (x, masks[0])),
    "a dictionary": (lambda x, mask: ({"x": x, "mask": mask},), lambda batch: (batch["x"], batch["mask"])),
}


class Masked(nn.Module):
    """Takes its mask out of its arguments."""

    def __init__(self, unpack):
        super().__init__()
        self.f, self.unpack = nn.Linear(WIDTH, WIDTH), unpack

    def forward(self, *arguments):
        x, mask = self.unpack(*arguments)
        return torch.where(mask, self.f(x), 0.0)


@pytest.mark.parametrize("place", PLACES)
def test_a_mask_of_the_batch_is_not_coded(place, device):
    pack, unpack = PLACES[place]
    x = random(*SHAPE, device=device)
    assert_keeps_no_more_than_stock(Masked(unpack).to(device), *pack(x, x > 0))


def test_a_mask_that_the_first_forward_makes_for_all_is_coded_in_none_after_it(device):
    def fn(model, x):
        if model.mask is None:
            model.mask = torch.rand_like(x) > 0.5
        return masked(model, x)

    model, x = Attack(fn, mask=None).to(device), random(*SHAPE, device=device)
    measure_kept(model, x)
    stock = measure_kept(model, x).total
    model.mask = None
    patch(model)
    measure_kept(model, x)
    assert measure_kept(model, x).total == stock


def test_two_forwards_before_a_backward_share_a_mask_that_outlives_the_first(device):
    only_on_cpu(device)
    masks = []

    def fn(model, x):
        if len(masks) < 1:
            masks.append(model.f(x).detach() > 0)
        return torch.where(masks[0], model.f(x), 0.0).sum()

    gradients = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        model, x = Attack(fn).to(device), random(*SHAPE, device=device)
        masks.clear()
        if is_ours:
            patch(model)
        (model(x) + model(2 * x)).backward()
        gradients.append(model.f.weight.grad)
    assert torch.equal(*gradients)


# A part of a mask


PARTS = {
    "the first half": lambda mask: mask[:8],
    "the second half": lambda mask: mask[8:],
    "a half that differs": None,
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_mask_is_coded_once_for_all(part, device):
    """Stock keeps the whole mask, a byte an element; here its bits."""

    def fn(model, x):
        x, mask = model.f(x), torch.rand(16, *SHAPE[1:], device=x.device) > 0.5
        for i in range(24):
            mine = mask[i % 9 : i % 9 + 8] if PARTS[part] is None else PARTS[part](mask)
            x = torch.where(mine, x, x.detach() * 0.5)
        return x

    x = random(*SHAPE, device=device)
    assert_trains_like_stock(fn, x)
    ours, stock = kept_of(fn, x)
    assert stock - ours == 2 * BOOLEANS - 2 * BOOLEANS // 8


class Masking(GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        return torch.where(mask, self.f(x).tanh(), torch.where(mask.logical_not(), x, 0.0))


def test_a_mask_for_many_blocks_is_coded_once(device):
    def fn(model, x):
        mask = torch.rand(SHAPE, device=x.device) > 0.5
        for block in model.blocks:
            x = block(x, mask)
        return x

    x, blocks = random(*SHAPE, device=device), nn.ModuleList(Masking() for _ in range(12))
    assert_trains_like_stock(fn, x, blocks=blocks)
    model = Attack(fn, blocks=blocks).to(device)
    patch(model)
    small = [s.nbytes for s in measure_kept(model, x).storages if s.nbytes <= BOOLEANS]
    assert small == [BOOLEANS // 8]


# Rectifiers


@pytest.mark.parametrize("count", [2, 40])
def test_rectifiers_of_one_tensor_with_one_threshold_share_their_bits(count, device):
    def fn(model, x):
        x = model.f(x)
        return sum(F.leaky_relu(x, 0.01 * i) for i in range(count)).sum()

    x = random(*SHAPE, device=device)
    assert_trains_like_stock(fn, x)
    ours, stock = kept_of(fn, x)
    assert stock - ours == 4 * BOOLEANS - BOOLEANS // 8


@pytest.mark.parametrize("count", [3, 31, 33, 100])
def test_rectifiers_of_one_tensor_with_many_thresholds_keep_no_more_than_it(count, device):
    def fn(model, x):
        x = model.f(x)
        return sum(F.threshold(x, 0.01 * i, 0.0) for i in range(count)).sum()

    x = random(*SHAPE, device=device)
    assert_trains_like_stock(fn, x)
    ours, stock = kept_of(fn, x)
    assert stock - ours == max(4 * BOOLEANS - count * BOOLEANS // 8, 0)


def test_bits_are_not_shared_with_what_was_written_since(device):
    """Stock refuses that."""
    x = random(*SHAPE, device=device).requires_grad_()
    with taping():
        z = x * 1
        y = F.relu6(z)
        y = y + F.relu6(z.neg_())
    y.sum().backward()
    assert torch.equal(x.grad, ((x > 0) & (x < 6)).float() - ((x < 0) & (x > -6)).float())


# Arguments of pools and paddings


POOLS = {
    "a tuple of one": dict(kernel_size=(2,)),
    "a list of one": dict(kernel_size=[2], stride=[1]),
    "a number of NumPy": dict(kernel_size=np.int64(2), stride=np.int64(1), padding=np.int64(1)),
    "no stride": dict(kernel_size=(2, 3), stride=[]),
    "a size": dict(kernel_size=torch.Size([2, 2]), dilation=(2,)),
}


@pytest.mark.parametrize("options", POOLS)
def test_a_pool_takes_what_stocks_takes(options, device):
    assert_trains_like_stock(on_images(nn.MaxPool2d(**POOLS[options])), random(*SHAPE, device=device))


def test_a_pool_refuses_what_stocks_refuses(device):
    errors = []
    for patched in (False, True):
        model = Attack(on_images(nn.MaxPool2d((2, 2, 2)))).to(device)
        if patched:
            patch(model)
        with pytest.raises(RuntimeError) as caught:
            model(random(*SHAPE, device=device))
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_a_convolution_pads_as_stocks_does(mode, dtype, device):
    """CPU's autocast converts what some paddings are given."""
    layer = nn.Conv1d(64, 64, 3, padding=1, padding_mode=mode)
    context = contextlib.nullcontext if dtype is None else lambda: autocasting(device, dtype)
    assert_trains_like_stock(
        lambda model, x: model.layer(model.f(x)).square(), random(*SHAPE, device=device), context, layer=layer
    )


# Layers without shape


LAZY = {
    "linear": lambda: [nn.LazyLinear(WIDTH), nn.GELU()],
    "batch norm": lambda: [nn.LazyBatchNorm1d(), nn.GELU()],
    "convolution": lambda: [nn.LazyConv1d(16, 3), nn.LazyBatchNorm1d(), nn.ReLU()],
}


@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_layer_gets_its_shape_in_the_first_forward(name, device):
    found = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        model = Attack(lambda model, x: model.layers(model.f(x)), layers=nn.Sequential(*LAZY[name]())).to(device)
        if is_ours:
            patch(model)
        found.append(trained(model, random(*SHAPE, device=device)))
    for got, expected in zip(*found, strict=True):
        assert_same(got, expected)
