"""``gated_mlp`` and ``chunked_gated_mlp``: the bits of LLaMA's and Phi-3's MLP, which keep the gate's two inputs."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from hf_memsave.arch import ARCHS
from hf_memsave.ops.expression import match
from hf_memsave.ops.gated_mlp import CHUNKED_GATED_MLP, GATED_MLP, kept_bytes
from support.helpers import (
    as_function,
    assert_backward_twice,
    assert_exact,
    assert_gradients_are_right,
    assert_no_worse_than_eager,
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
NAMES = {
    kind: next(site.names for site in ARCHS[kind].sites if site.op.endswith("gated_mlp")) for kind in ("llama", "phi3")
}
OPS = {"llama": GATED_MLP, "phi3": CHUNKED_GATED_MLP}
PARAMETERS = {"llama": 3, "phi3": 2}
SUBSETS = [(kind, wanted) for kind, count in PARAMETERS.items() for wanted in subsets(1 + count)]


def build(kind, device, dtype=torch.float32, act="silu", hidden=HIDDEN, width=WIDTH):
    sizes = dict(hidden_size=hidden, intermediate_size=width, hidden_act=act, num_attention_heads=2, pad_token_id=0)
    module = LlamaMLP(LlamaConfig(**sizes)) if kind == "llama" else Phi3MLP(Phi3Config(**sizes))
    return module.to(device, dtype)


def patched(kind, stock):
    return swap_children(swapped(copy.deepcopy(stock), OPS[kind].name, **NAMES[kind]))


def inputs(stock, device, shape=(3, 5, HIDDEN)):
    dtype = next(stock.parameters()).dtype
    return [random(*shape, dtype=dtype, device=device), *stock.parameters()]


@pytest.fixture(params=OPS)
def kind(request):
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "wanted"), SUBSETS, ids=str)
def test_gated_mlp_is_exact(device, kind, dtype, wanted):
    only_on_cpu(device)
    stock = build(kind, device, dtype)
    assert_exact(as_function(patched(kind, stock)), as_function(stock), inputs(stock, device), wanted=wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_gated_mlp_is_exact_in_other_dtypes(device, kind, dtype):
    only_on_cpu(device)
    stock = build(kind, device, dtype)
    assert_exact(as_function(patched(kind, stock)), as_function(stock), inputs(stock, device))


@pytest.mark.parametrize("act", ["gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "quick_gelu"])
def test_gated_mlp_is_exact_for_other_activations(device, kind, act):
    only_on_cpu(device)
    stock = build(kind, device, act=act)
    assert_exact(as_function(patched(kind, stock)), as_function(stock), inputs(stock, device))


def test_gated_mlp_is_exact_under_autocast(device, kind):
    only_on_cpu(device)
    stock = build(kind, device)
    ours = as_function(patched(kind, stock))
    assert_exact(ours, as_function(stock), inputs(stock, device), autocast=torch.bfloat16)


def test_gated_mlp_is_exact_with_stock_children(device, kind):
    only_on_cpu(device)
    stock = build(kind, device)
    ours = swapped(copy.deepcopy(stock), OPS[kind].name, **NAMES[kind])
    assert_exact(as_function(ours), as_function(stock), inputs(stock, device))


@pytest.mark.parametrize("shape", [(HIDDEN,), (1, HIDDEN), (0, HIDDEN), (2, 0, HIDDEN)], ids=str)
def test_gated_mlp_is_exact_for_odd_shapes(device, kind, shape):
    only_on_cpu(device)
    stock = build(kind, device)
    assert_exact(as_function(patched(kind, stock)), as_function(stock), inputs(stock, device, shape))


def test_gated_mlp_is_exact_for_a_view(device, kind):
    only_on_cpu(device)
    stock = build(kind, device)
    reference, ours = as_function(stock), as_function(patched(kind, stock))
    given = inputs(stock, device, (5, 3, HIDDEN))
    assert_exact(lambda x, *p: ours(x.transpose(0, 1), *p), lambda x, *p: reference(x.transpose(0, 1), *p), given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gated_mlp_is_no_worse_than_eager(device, kind, dtype):
    stock = build(kind, device, dtype)
    assert_no_worse_than_eager(as_function(patched(kind, stock)), as_function(stock), inputs(stock, device))


def test_gated_mlp_has_the_right_gradients(device, kind):
    stock = build(kind, device, torch.float64, hidden=2, width=3)
    assert_gradients_are_right(as_function(patched(kind, stock)), *inputs(stock, device, (2, 2)))


def test_gated_mlp_runs_backward_twice(device, kind):
    stock = build(kind, device)
    assert_backward_twice(as_function(patched(kind, stock)), *inputs(stock, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gated_mlp_keeps_what_it_claims(device, dtype):
    stock = build("llama", device, dtype)
    x = random(3, 5, HIDDEN, dtype=dtype, device=device)
    claim = kept_bytes((3, 5, WIDTH), x.itemsize)
    # Beyond x itself, which gate and up keep.
    assert kept(stock, x, tape=False, linear=False) == x.nbytes + claim.eager
    assert kept(patched("llama", stock), x, tape=True, linear=False) == x.nbytes + claim.here


def test_chunked_gated_mlp_keeps_what_it_claims(device):
    stock = build("phi3", device)
    x = random(3, 5, HIDDEN, device=device)
    claim = kept_bytes((3, 5, WIDTH), x.itemsize)
    assert kept(stock, x, tape=False, linear=False) == x.nbytes + claim.eager
    assert kept(patched("phi3", stock), x, tape=True, linear=False) == x.nbytes + claim.here


def test_gated_mlp_under_autocast_keeps_no_copy_of_x_or_the_weights(device, kind):
    stock = build(kind, device)
    x = random(3, 5, HIDDEN, device=device)
    claim = kept_bytes((3, 5, WIDTH), torch.bfloat16.itemsize)
    assert kept(patched(kind, stock), x, tape=True, linear=False, autocast=torch.bfloat16) == x.nbytes + claim.here


def test_gated_mlp_is_stock_without_a_tape(device, kind):
    stock = build(kind, device)
    ours = patched(kind, stock)
    given = inputs(stock, device)
    assert_same_result(run(as_function(ours), given), run(as_function(stock), given))
    assert kept(ours, given[0], tape=False) == kept(stock, given[0], tape=False)


def test_gated_mlp_uses_a_child_that_was_replaced_later(device, kind):
    only_on_cpu(device)
    stock = build(kind, device)
    ours = patched(kind, stock)
    down = nn.Linear(WIDTH, HIDDEN, device=device)
    for module in (stock, ours):
        module.down_proj = copy.deepcopy(down)
    assert_exact(as_function(ours), as_function(stock), inputs(stock, device))


def test_gated_mlp_refuses_a_child_that_is_no_module(kind):
    module = build(kind, "cpu")
    module.down_proj = None
    assert "its down_proj is NoneType, not a module" in OPS[kind].check(module, NAMES[kind])


def test_gated_mlp_accepts_stock_modules(kind):
    module = build(kind, "cpu")
    assert OPS[kind].check(module, NAMES[kind]) is None
    assert match(type(module).forward, OPS[kind].expressions) == NAMES[kind]


def test_gated_mlp_tells_its_two_kinds_apart():
    assert match(LlamaMLP.forward, CHUNKED_GATED_MLP.expressions) is None
    assert match(Phi3MLP.forward, GATED_MLP.expressions) is None
