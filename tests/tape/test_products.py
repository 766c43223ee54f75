"""Matrix products under autocast: stock's bits without half copies of inputs and weights."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from hf_memsave import measure_kept
from support import helpers

ROWS, IN, OUT = 15, 8, 4
LOW = [torch.bfloat16, torch.float16]


@pytest.fixture(params=[partial(nn.Linear, IN, OUT), partial(Conv1D, OUT, IN)], ids=["linear", "conv1d"])
def module(request, device):
    module = request.param().to(device)
    nn.init.normal_(module.bias)  # Conv1D's is zero
    return module


def inputs(module, device, shape=(3, 5, IN), dtype=torch.float32):
    return [helpers.random(*shape, dtype=dtype, device=device), *module.parameters()]


def assert_is_stocks(fn, given, **options):
    helpers.only_on_cpu(given[0].device)
    helpers.assert_exact(fn, fn, given, **options)


def test_a_linear_is_exact(device, module):
    """Under autocast for every choice of gradients, of half weights, of odd shapes; and without, in every dtype."""
    call, low = helpers.as_function(module), LOW[0]
    for wanted, dtype in product(helpers.subsets(3), (torch.float32, low)):
        assert_is_stocks(call, inputs(module, device, dtype=dtype), wanted=wanted, autocast=low)
    for shape in ((IN,), (1, IN), (0, IN), (2, 1, 3, IN)):
        assert_is_stocks(call, inputs(module, device, shape), autocast=low)
    for weight_dtype, autocast in product(LOW, LOW):
        assert_is_stocks(helpers.as_function(module.to(weight_dtype)), inputs(module, device), autocast=autocast)
    for dtype in helpers.DTYPES:
        assert_is_stocks(helpers.as_function(module.to(dtype)), inputs(module, device, dtype=dtype))
    assert_is_stocks(call, inputs(module.double(), device, dtype=torch.float64), autocast=low)  # which leaves it alone
    for autocast in (None, low):
        with helpers.autocasting(device, autocast):
            helpers.assert_backward_twice(call, *inputs(module.float(), device))


def of_views(x, w, *_):
    return F.linear(x[:, ::2], w[:, 32:]) + F.linear(x[1:, 32:], w[:, ::2]).sum(0)


def of_one_input(x, *weights):
    """q, k and v: their gradients are added in x's dtype, not in autocast's."""
    return sum(F.linear(x, weight) for weight in weights[:3])


def called_again(x, w, *_, is_cached=True):
    """As stock does, with one cast of the weight for all calls: their gradients are added in half precision."""
    with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=is_cached):
        for _ in range(3):
            x = F.linear(x, w, w[0]).float().sin()
        return x @ w + x.mT.mT @ w


def with_autocast_off(x, w, *_):
    y = F.linear(x, w)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(y.float(), w)


def of_parts(x, *weights):
    """Conversions of other parts of a storage stay apart."""
    h = torch.tanh(x) * 3
    parts = *h.chunk(2), h.view(2, -1, 64)[0], torch._neg_view(h[: len(h) // 2])
    return sum(F.linear(part, weight) for weight, part in zip(weights, parts, strict=True))


@pytest.mark.parametrize(
    "fn", [of_views, of_one_input, called_again, partial(called_again, is_cached=False), with_autocast_off, of_parts]
)
def test_products_that_share_are_exact(device, fn):
    weights = [helpers.random(64, 64, device=device, seed=s) for s in range(1, 5)]
    assert_is_stocks(fn, [helpers.random(8, 64, device=device), *weights], autocast=torch.bfloat16)


#: Other spellings of a product, of x [7, 64], a weight [64, 64] and a bias [64].
PRODUCTS = {
    "matmul": lambda x, w, b: torch.matmul(x, w) + x.matmul(w) + x @ w,
    "w @ x": lambda x, w, b: w @ x.mT,
    "mm": lambda x, w, b: torch.mm(x, w) + x.mm(w),
    "bmm": lambda x, w, b: torch.bmm(x[None], w[None]) + x[None].bmm(w[None]),
    "addmm": lambda x, w, b: torch.addmm(b, x, w) + b.addmm(x, w),
    "addmm with factors": lambda x, w, b: torch.addmm(b, x, w, beta=0.5, alpha=2.0),
    "baddbmm": lambda x, w, b: torch.baddbmm(b, x[None], w[None]) + b.expand(1, 7, 64).baddbmm(x[None], w[None]),
    "addbmm": lambda x, w, b: torch.addbmm(b, x[None], w[None]) + b.expand(7, 64).addbmm(x[None], w[None]),
    "by name": lambda x, w, b: F.linear(x, weight=w, bias=b) + torch.matmul(input=x, other=w),
    "linear without bias": lambda x, w, b: F.linear(x, w, None) + F.linear(x, w, bias=b),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_exact_and_keeps_no_more_than_stock(device, name):
    given = [
        helpers.random(7, 64, device=device),
        helpers.random(64, 64, device=device, seed=1),
        helpers.random(64, device=device, seed=2),
    ]
    weight, bias = (nn.Parameter(t) for t in given[1:])
    for autocast in (None, *LOW):
        if name != "w @ x":
            assert_is_stocks(PRODUCTS[name], given, autocast=autocast)
        fn = partial(PRODUCTS[name], w=weight, b=bias)
        stock, here = (helpers.kept(fn, given[0], tape, linear=False, autocast=autocast) for tape in (False, True))
        assert here <= stock


@pytest.mark.parametrize("autocast", LOW, ids=str)
def test_a_linear_under_autocast_keeps_nothing_beside_its_input(device, module, autocast):
    x = helpers.random(3, 5, IN, device=device)
    options = dict(producer=torch.sigmoid, linear=False, autocast=autocast)
    copies = (ROWS * IN + IN * OUT) * autocast.itemsize
    assert helpers.kept(module, x, tape=False, **options) == x.nbytes + copies
    assert helpers.kept(module, x, tape=True, **options) == x.nbytes


def test_conversions_of_one_tensor_add_their_gradients_in_its_dtype(device):
    weights = [helpers.random(64, dtype=torch.bfloat16, device=device, seed=s) for s in range(3)]
    assert_is_stocks(lambda x: sum(x.bfloat16() * w for w in weights), [helpers.random(64, device=device)])
    for view in helpers.LAYOUTS.values():
        assert_is_stocks(lambda x, view=view: view(x).bfloat16().float(), [helpers.random(4, 5, 8, device=device)])


def test_a_cast_of_a_weight_is_made_once_in_a_forward_and_kept_by_nobody(device):
    """A tied or shared layer, as in ALBERT; but made again once the weight is written to."""
    helpers.only_on_cpu(device)
    layer, x, outputs = nn.Linear(64, 64).to(device), helpers.random(16, 64, device=device), []

    def shared(x, tape):
        with helpers.laid(tape), helpers.autocasting(x.device, torch.bfloat16):
            for _ in range(4):
                x = layer(x).float().relu()
            return {"loss": x.sum()}

    stock, here = (measure_kept(helpers.Calls(partial(shared, tape=tape)), x) for tape in (False, True))
    low = layer.weight.numel() * 2
    assert low in [s.nbytes for s in stock.storages]
    assert low not in [s.nbytes for s in here.storages]
    for tape in (True, False):
        weight = helpers.random(64, 64, device=device, seed=1).requires_grad_()
        with helpers.autocasting(device, torch.bfloat16), helpers.laid(tape):
            first = F.linear(x, weight)
            with torch.no_grad():
                weight.mul_(2)
            outputs.append(first + F.linear(x, weight))
    helpers.assert_same_bits(*outputs)


class Conversions(TorchDispatchMode):
    """Counts those of a tensor of ``shape`` to bf16."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += func is torch.ops.aten._to_copy.default and (out.dtype, out.shape) == (LOW[0], self.shape)
        return out


@pytest.mark.parametrize("between", [lambda h: h, lambda h: h.mul_(2)], ids=["nothing", "a write"])
def test_backward_converts_once_what_several_products_took(device, between):
    helpers.only_on_cpu(device)

    def branches(x, q, k, v):
        h = torch.tanh(x) * 3  # the second of two functions that are remade from x
        first = F.linear(h, q)
        h = between(h)
        return first + F.linear(h, k) + F.linear(h, v)

    given = [
        helpers.random(ROWS, IN, device=device),
        *(helpers.random(OUT, IN, device=device, seed=s) for s in (1, 2, 3)),
    ]
    assert_is_stocks(branches, given, autocast=torch.bfloat16)
    with helpers.taping(), helpers.autocasting(device, torch.bfloat16):
        loss = branches(*(t.requires_grad_() for t in given)).sum()
    with Conversions(given[0].shape) as seen:
        loss.backward()
    assert seen.count == 1  # what was converted before a write has been kept
