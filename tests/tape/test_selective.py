"""Convolutions, batch norms, pools, paddings and rectifiers under a tape: stock's bits, whatever wants a gradient."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from support import helpers
from support.selective import LAYERS, RECTIFIERS

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'", "ignore:dropout2d")


def settings(name, layer, count):
    """For a layer of ``count`` tensors: whether it trains, dtype, wanted gradients, autocast, and a memory format."""
    all_or_frozen = {(True,) * count, (True,) + (False,) * (count - 1)}
    for training in layer.modes:
        yield from ((training, torch.float32, wanted, None, None) for wanted in helpers.subsets(count))
        yield from ((training, dtype, wanted, None, None) for dtype in helpers.DTYPES[1:] for wanted in all_or_frozen)
    yield from ((True, torch.float32, wanted, torch.bfloat16, None) for wanted in all_or_frozen)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(layer.shape))
    if last and "unbatched" not in name:
        yield from ((False, torch.float32, wanted, None, last) for wanted in all_or_frozen)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_exact_whatever_wants_a_gradient(device, name):
    helpers.only_on_cpu(device)
    layer = LAYERS[name]
    for training, dtype, wanted, autocast, last in settings(name, layer, 1 + len(list(layer.make().parameters()))):
        if name == "AvgPool3d" and dtype in (torch.bfloat16, torch.float16):  # stock has no kernel
            continue
        stock, ours = layer.pair(device, dtype, training)

        def call(module, last=last):
            fn = helpers.as_function(module)
            return lambda x, *rest: fn(x if last is None else x.contiguous(memory_format=last), *rest)

        # All as separate tensors, which each side of a comparison copies.
        given = [helpers.random(*layer.shape, dtype=dtype, device=device), *(p.detach() for p in stock.parameters())]
        helpers.assert_exact(call(ours), call(stock), given, wanted=wanted, autocast=autocast)
        assert [name for name, _ in ours.named_buffers()] == [name for name, _ in stock.named_buffers()]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours.buffers(), stock.buffers(), strict=True))


@pytest.mark.parametrize("name", RECTIFIERS)
def test_a_rectifier_is_exact_for_views_and_for_numbers_at_and_beyond_its_bounds(device, name):
    helpers.only_on_cpu(device)
    inf, nan = torch.inf, torch.nan
    edges = [0.0, -0.0, 1e-45, -1e-45, 6e-8, 6.0, 0.1, 0.7, -0.3, 1.0, inf, -inf, nan, -nan, 65504.0, 6.01, -1, 5]
    for dtype in helpers.DTYPES:
        stock, ours = LAYERS[name].pair(device, dtype)
        helpers.assert_exact(ours, stock, [torch.tensor(edges * 4, dtype=dtype, device=device)])
    module = LAYERS[name].make()
    for view in helpers.LAYOUTS.values():
        helpers.assert_exact(*[lambda x: module(view(x))] * 2, [helpers.random(3, 8, 5, device=device)])  # noqa: B023


def test_a_layer_is_exact_for_an_empty_batch(device):
    helpers.only_on_cpu(device)
    for name in ("Conv2d-zeros", "MaxPool2d", "AvgPool2d", "Dropout2d", "ReLU", "ReLU6"):
        module = LAYERS[name].make().to(device).requires_grad_(False)
        helpers.assert_exact(module, module, [helpers.random(0, *LAYERS[name].shape[1:], device=device)])


CALLS = {
    "torch.relu by name": lambda x: torch.relu(input=x),
    "Tensor.relu": lambda x: x.relu(),
    "Tensor.relu_": lambda x: (x * 1).relu_(),
    "leaky relu by name": lambda x: F.leaky_relu(x, negative_slope=0.2),
    "hardtanh by name": lambda x: F.hardtanh(x, min_val=-0.2, max_val=0.3),
    "hardtanh by place": lambda x: F.hardtanh(x, -0.2, 0.3, False),
    "hardtanh without a bound": lambda x: F.hardtanh(x, 0.0, float("inf")),
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
    "threshold of a bool": lambda x: F.threshold(x, True, 3.0),
    "hardtanh of a bool": lambda x: F.hardtanh(x, False, 2.0),
    "threshold by name": lambda x: F.threshold(x, threshold=0.1, value=-1.0),
    "torch.threshold": lambda x: torch.threshold(x, 0.1, 0.0),
    "max pool by name": lambda x: F.max_pool2d(input=x, kernel_size=3, stride=2, padding=1, ceil_mode=True),
    "max pool with indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "torch.max_pool2d": lambda x: torch.max_pool2d(x, 2),
    "average pool by name": lambda x: F.avg_pool2d(input=x, kernel_size=2, count_include_pad=False, padding=1),
    "adaptive average pool": lambda x: F.adaptive_avg_pool2d(x, (None, 2)),
    **{f"pad {mode}": partial(lambda x, mode: F.pad(x, (1, 2, 2, 1), mode=mode), mode=mode)
       for mode in ("constant", "reflect", "replicate", "circular")},
    "pad of nothing": lambda x: F.pad(x, (0, 0)),
    "pad by name": lambda x: F.pad(input=x, pad=(1, 1), value=3.0),
    "cut": lambda x: F.pad(x, (-1, -1)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_it_is_exact_however_it_is_called(device, name):
    helpers.only_on_cpu(device)
    for dtype in (torch.float32, torch.bfloat16):
        x, found = helpers.random(2, 4, 8, 9, dtype=dtype, device=device), []
        helpers.assert_exact(CALLS[name], CALLS[name], [x])
        for tape in (True, False):
            leaf = x.clone().requires_grad_()
            with helpers.laid(tape):
                y = CALLS[name](leaf * 1)  # which nothing else keeps: where it was read, it may be had anyway
            y.backward(helpers.random(*y.shape, dtype=dtype, device=device, seed=2))
            found.append(leaf.grad)
        helpers.assert_same_bits(*found)


def test_a_convolution_is_exact_by_names_and_by_places(device):
    helpers.only_on_cpu(device)
    by_names = lambda x, w, b: F.conv2d(input=x, weight=w, bias=b, padding=1)  # noqa: E731
    by_places = lambda x, w, b: F.conv2d(x, w, b, 1, 1)  # noqa: E731
    given = [helpers.random(*shape, device=device) for shape in ((2, 4, 6, 6), (3, 4, 3, 3), (3,))]
    for fn, wanted, autocast in product((by_names, by_places), helpers.subsets(3), (None, torch.bfloat16)):
        helpers.assert_exact(fn, fn, given, wanted=wanted, autocast=autocast)


TRAINED = ("Conv1d-reflect", "ConvTranspose1d", "BatchNorm1d")
ONE_OF_EACH = [
    *TRAINED, "Conv2d-same", "Conv2d-strided", "ConvTranspose2d-nobias", "BatchNorm1d-plain", "MaxPool2d", "MaxPool3d",
    "AvgPool2d", "AdaptiveAvgPool2d", "Dropout2d", *RECTIFIERS, "ReLU-inplace",
]  # fmt: skip


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_layer_has_the_right_second_derivatives_and_runs_backward_twice(device, name):
    layer = LAYERS[name]
    module, _ = layer.pair(device, torch.float64, training=layer.kind == "channel_dropout")
    small = [min(size, 3 if len(layer.shape) < 5 else 2) for size in layer.shape[2:]]
    x = helpers.random(1, layer.shape[1], *small, dtype=torch.float64, device=device)

    def call(function, *inputs):  # with one dropout
        torch.manual_seed(0)
        return function(inputs[0] * 1, *inputs[1:])

    if name in TRAINED:
        two = torch.cat([x, x.flip(-1)])
        helpers.assert_gradients_are_right(
            partial(call, helpers.as_function(module)), two, *(p.detach() for p in module.parameters())
        )
    helpers.assert_gradients_are_right(partial(call, module.requires_grad_(False)), x)
    helpers.assert_backward_twice(partial(call, module), x)
