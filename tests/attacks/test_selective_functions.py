"""Attacks on what is kept in a bit an element, and on the arguments of pools, paddings and lazy layers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_memsave import measure_kept, patch
from support.attacks import WIDTH, Attack, Block, assert_alike, assert_trains_like_stock, kept_of, pair, trained
from support.helpers import Calls, only_on_cpu, random, taping

SHAPE = (8, 64, WIDTH)
BOOLEANS = 8 * 64 * WIDTH


def on_images(layer):
    return lambda model, x: model.f(layer(x.unflatten(1, (4, 16)).transpose(2, 3)).flatten(1)[:, :WIDTH])


def masked(model, x):
    return torch.where(model.mask, model.f(x), 0.0)


def assert_keeps_no_more_than_stock(model, *batch):
    """At the first forward, and when an earlier one has seen all that lives on."""
    stock = measure_kept(model, batch).total
    patch(model)
    assert [measure_kept(model, batch).total for _ in range(2)] == [stock, stock]


#: Where a batch has its mask: what the model is called with, and how it takes that apart.
PLACES = {
    "an argument": (lambda x, mask: (x, mask), lambda x, mask: (x, mask)),
    "a list": (lambda x, mask: (x, [mask]), lambda x, masks: (x, masks[0])),
    "a dictionary": (lambda x, mask: ({"x": x, "mask": mask},), lambda batch: (batch["x"], batch["mask"])),
}


def test_a_mask_of_the_batch_or_of_a_plain_attribute_is_not_coded(device):
    x, linear = random(*SHAPE, device=device), nn.Linear(WIDTH, WIDTH).to(device)
    model = Attack(masked).to(device)
    model.mask = x > 0
    assert_keeps_no_more_than_stock(model, x)
    for pack, unpack in PLACES.values():

        def fn(*arguments, unpack=unpack):
            x, mask = unpack(*arguments)
            return torch.where(mask, linear(x), 0.0)

        assert_keeps_no_more_than_stock(Calls(fn, linear), *pack(x, x > 0))


def test_a_mask_that_the_first_forward_makes_for_all_is_coded_in_none_after_it(device):
    def fn(model, x):
        if model.mask is None:
            model.mask = torch.rand_like(x) > 0.5
        return masked(model, x)

    (ours, stock), x = pair(fn, device, mask=None), random(*SHAPE, device=device)
    kept = [[measure_kept(model, x).total for _ in range(2)] for model in (ours, stock)]
    assert kept[0][1] == kept[1][1]


def test_two_forwards_before_a_backward_share_a_mask_that_outlives_the_first(device):
    only_on_cpu(device)

    def fn(model, x):
        model.masks = model.masks or [model.f(x).detach() > 0]
        return torch.where(model.masks[0], model.f(x), 0.0).sum()

    def run(model):
        x = random(*SHAPE, device=device)
        (model(x) + model(2 * x)).backward()
        return model.f.weight.grad

    assert_alike(lambda: Attack(fn, masks=[]).to(device), run)


@pytest.mark.parametrize("starts", [[0], [8], range(9)], ids=["first half", "second half", "a half that differs"])
def test_a_part_of_a_mask_is_coded_once_for_all(starts, device):
    """Stock keeps the whole mask, a byte an element; here its bits."""

    def fn(model, x):
        x, mask = model.f(x), torch.rand(16, *SHAPE[1:], device=x.device) > 0.5
        for i in range(24):
            start = starts[i % len(starts)]
            x = torch.where(mask[start : start + 8], x, x.detach() * 0.5)
        return x

    x = random(*SHAPE, device=device)
    assert_trains_like_stock(fn, x)
    ours, stock = kept_of(fn, x)
    assert stock - ours == 2 * BOOLEANS - 2 * BOOLEANS // 8


def test_a_mask_for_many_blocks_is_coded_once(device):
    def fn(model, x):
        mask = torch.rand(SHAPE, device=x.device) > 0.5
        for block in model.blocks:
            x = block(x, mask)
        return x

    masking = lambda block, x, m: torch.where(m, block.f(x).tanh(), torch.where(m.logical_not(), x, 0.0))  # noqa: E731
    x, blocks = random(*SHAPE, device=device), nn.ModuleList(Block(masking) for _ in range(12))
    assert_trains_like_stock(fn, x, blocks=blocks)
    model, _ = pair(fn, device, blocks=blocks)
    small = [s.nbytes for s in measure_kept(model, x).storages if s.nbytes <= BOOLEANS]
    assert small == [BOOLEANS // 8]


@pytest.mark.parametrize(
    ("count", "by", "bits"),
    [(40, F.leaky_relu, 1)]  # whose threshold is one
    + [(count, lambda x, bound: F.threshold(x, bound, 0.0), count) for count in (3, 31, 33)],
)
def test_rectifiers_of_one_tensor_share_the_bits_of_a_threshold_and_keep_no_more_than_it(count, by, bits, device):
    """As many of one tensor, each by its own number."""

    def fn(model, x):
        x = model.f(x)
        return sum(by(x, 0.01 * i) for i in range(count)).sum()

    x = random(*SHAPE, device=device)
    assert_trains_like_stock(fn, x)
    ours, stock = kept_of(fn, x)
    assert stock - ours == max(4 * BOOLEANS - bits * BOOLEANS // 8, 0)


def test_bits_are_not_shared_with_what_was_written_since(device):
    """Stock refuses that."""
    x = random(*SHAPE, device=device).requires_grad_()
    with taping():
        z = x * 1
        y = F.relu6(z)
        y = y + F.relu6(z.neg_())
    y.sum().backward()
    assert torch.equal(x.grad, ((x > 0) & (x < 6)).float() - ((x < 0) & (x > -6)).float())


POOLS = {
    "a tuple of one": dict(kernel_size=(2,)),
    "a list of one": dict(kernel_size=[2], stride=[1]),
    "a number of NumPy": dict(kernel_size=np.int64(2), stride=np.int64(1), padding=np.int64(1)),
    "no stride": dict(kernel_size=(2, 3), stride=[]),
    "a size": dict(kernel_size=torch.Size([2, 2]), dilation=(2,)),
}


def test_a_pool_takes_what_stocks_takes_and_refuses_what_it_refuses(device):
    for options in POOLS.values():
        assert_trains_like_stock(on_images(nn.MaxPool2d(**options)), random(*SHAPE, device=device))
    errors = []
    for model in pair(on_images(nn.MaxPool2d((2, 2, 2))), device):
        with pytest.raises(RuntimeError) as caught:
            model(random(*SHAPE, device=device))
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_a_lazy_layer_gets_its_shape_in_the_first_forward(device):
    def make():
        lazy = nn.LazyConv1d(16, 3), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(WIDTH), nn.GELU()
        return Attack(lambda model, x: model.layers(model.f(x)), layers=nn.Sequential(*lazy)).to(device)

    assert_alike(make, lambda model: trained(model, random(*SHAPE, device=device)))
