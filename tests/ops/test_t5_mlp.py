"""``t5_mlp`` and ``t5_gated_mlp``: the bits of T5's feed-forwards, which keep ReLU's output or the gate's inputs."""

import copy

import pytest
import torch
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5DenseActDense, T5DenseGatedActDense

from hf_memsave.ops.expression import match
from hf_memsave.ops.t5_mlp import T5_GATED_MLP, T5_MLP
from support.helpers import (
    as_function,
    assert_backward_twice,
    assert_exact,
    assert_gradients_are_right,
    assert_same_result,
    kept,
    only_on_cpu,
    random,
    run,
    subsets,
    swap_children,
    swapped,
)

HIDDEN, WIDTH = 8, 12
ROWS = 15
KINDS = {
    "relu": (T5DenseActDense, T5_MLP, "relu", 2),
    "gated-gelu": (T5DenseGatedActDense, T5_GATED_MLP, "gated-gelu", 3),
}
SUBSETS = [(kind, wanted) for kind, (*_, count) in KINDS.items() for wanted in subsets(1 + count)]
#: What the kept state of dropout's generator takes.
STATE = {"cpu": 5056, "cuda": 16}


def build(kind, device, dtype=torch.float32, dropout=0.1, act=None, hidden=HIDDEN, width=WIDTH):
    cls, _, default, _ = KINDS[kind]
    config = T5Config(d_model=hidden, d_ff=width, dropout_rate=dropout, feed_forward_proj=act or default)
    return cls(config).to(device, dtype)


def patched(kind, stock):
    return swap_children(swapped(copy.deepcopy(stock), KINDS[kind][1].name))


def inputs(stock, device, shape=(3, 5, HIDDEN)):
    return [random(*shape, dtype=next(stock.parameters()).dtype, device=device), *stock.parameters()]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "wanted"), SUBSETS, ids=str)
def test_t5_mlp_is_exact(device, kind, dtype, wanted):
    only_on_cpu(device)
    stock = build(kind, device, dtype)
    assert_exact(as_function(patched(kind, stock)), as_function(stock), inputs(stock, device), wanted=wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_t5_mlp_is_exact_in_other_dtypes(device, kind, dtype):
    only_on_cpu(device)
    stock = build(kind, device, dtype)
    assert_exact(as_function(patched(kind, stock)), as_function(stock), inputs(stock, device))


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_t5_mlp_is_exact_under_autocast(device, kind, autocast):
    only_on_cpu(device)
    stock = build(kind, device)
    ours = as_function(patched(kind, stock))
    assert_exact(ours, as_function(stock), inputs(stock, device), autocast=autocast)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_t5_mlp_is_exact_with_an_fp32_output_projection(device, kind, dtype):
    # As Transformers loads T5 in half precision.
    only_on_cpu(device)
    stock = build(kind, device, dtype)
    stock.wo.float()
    assert_exact(as_function(patched(kind, stock)), as_function(stock), inputs(stock, device))


def test_t5_mlp_is_exact_without_dropout(device, kind):
    only_on_cpu(device)
    stock = build(kind, device, dropout=0.0)
    assert_exact(as_function(patched(kind, stock)), as_function(stock), inputs(stock, device))


def test_t5_mlp_is_exact_in_eval(device, kind):
    only_on_cpu(device)
    stock = build(kind, device).eval()
    assert_exact(as_function(patched(kind, stock)), as_function(stock), inputs(stock, device))


@pytest.mark.parametrize("act", ["gated-silu", "gated-relu", "gated-gelu_fast"])
def test_t5_gated_mlp_is_exact_for_other_activations(device, act):
    only_on_cpu(device)
    stock = build("gated-gelu", device, act=act)
    assert_exact(as_function(patched("gated-gelu", stock)), as_function(stock), inputs(stock, device))


@pytest.mark.parametrize("shape", [(HIDDEN,), (1, HIDDEN), (0, HIDDEN), (2, 0, HIDDEN)], ids=str)
def test_t5_mlp_is_exact_for_odd_shapes(device, kind, shape):
    only_on_cpu(device)
    stock = build(kind, device)
    assert_exact(as_function(patched(kind, stock)), as_function(stock), inputs(stock, device, shape))


def test_t5_mlp_is_exact_for_a_view(device, kind):
    only_on_cpu(device)
    stock = build(kind, device)
    reference, ours = as_function(stock), as_function(patched(kind, stock))
    given = inputs(stock, device, (5, 3, HIDDEN))
    assert_exact(lambda x, *p: ours(x.transpose(0, 1), *p), lambda x, *p: reference(x.transpose(0, 1), *p), given)


def test_t5_mlp_has_the_right_gradients(device):
    # The gated one: the other's ReLU has a corner.
    stock = build("gated-gelu", device, torch.float64, hidden=2, width=3)
    call = as_function(patched("gated-gelu", stock))

    def same_mask(*tensors):
        torch.manual_seed(0)
        return call(*tensors)

    assert_gradients_are_right(same_mask, *inputs(stock, device, (2, 2)))


def test_t5_mlp_runs_backward_twice(device, kind):
    stock = build(kind, device)
    assert_backward_twice(as_function(patched(kind, stock)), *inputs(stock, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_t5_mlp_keeps_relus_output(device, dtype):
    stock = build("relu", device, dtype)
    x = random(3, 5, HIDDEN, dtype=dtype, device=device)
    here = ROWS * WIDTH * x.itemsize + STATE[device.type]
    assert kept(patched("relu", stock), x, tape=True, linear=False) == x.nbytes + here


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_t5_gated_mlp_keeps_the_inputs_of_its_gate(device, dtype):
    stock = build("gated-gelu", device, dtype)
    x = random(3, 5, HIDDEN, dtype=dtype, device=device)
    here = 2 * ROWS * WIDTH * x.itemsize + STATE[device.type]
    factors = 3 * 8  # the numbers in GELU's expression
    assert kept(patched("gated-gelu", stock), x, tape=True, linear=False) == x.nbytes + here + factors


def test_t5_mlp_keeps_no_copy_for_an_fp32_output_projection(device):
    stock = build("relu", device, torch.bfloat16)
    ours = patched("relu", stock)
    x = random(3, 5, HIDDEN, dtype=torch.bfloat16, device=device)
    before = kept(ours, x, tape=True, linear=False)
    ours.wo.float()
    assert kept(ours, x, tape=True, linear=False) == before


def test_t5_mlp_is_stock_without_a_tape(device, kind):
    stock = build(kind, device)
    ours = patched(kind, stock)
    given = inputs(stock, device)
    assert_same_result(run(as_function(ours), given), run(as_function(stock), given))
    assert kept(ours, given[0], tape=False) == kept(stock, given[0], tape=False)


def test_t5_mlp_refuses_a_child_that_is_no_module(kind):
    module = build(kind, "cpu")
    module.dropout = None
    assert "its dropout is NoneType, not a module" in KINDS[kind][1].check(module, {})


def test_t5_mlp_accepts_stock_modules(kind):
    cls, op, *_ = KINDS[kind]
    assert op.check(build(kind, "cpu"), {}) is None
    found = match(cls.forward, op.expressions)
    assert found == {name: name for name in found}


def test_t5_mlp_tells_its_two_kinds_apart():
    assert match(T5DenseActDense.forward, T5_GATED_MLP.expressions) is None
    assert match(T5DenseGatedActDense.forward, T5_MLP.expressions) is None
