"""Attacks by tensors that look the same: views of one parameter, conjugates; by what indexes; and by sparse ones."""

import contextlib

import numpy as np
import pytest
import torch
from peft import ShiraConfig, get_peft_model
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from hf_memsave import KeptTensorChangedError, patch
from hf_memsave.arch.versions import enable_checkpointing
from hf_memsave.tape.frame import Frame
from hf_memsave.tape.tape import Tape
from support.attacks import WIDTH, Attack, Block, assert_alike, assert_trains_like_stock, kept_of, trained
from support.helpers import only_on_cpu, random
from support.steps import assert_same, step
from support.zoo import Size, batch_for, build

SMALL = Size(seq=8)
#: As before the forward, where no tape sees it.
DATA = torch.Tensor.data.__get__

VIEWS = {
    "transposed": lambda p: (p, p.T),
    "every second row": lambda p: (p[: WIDTH // 2].repeat(2, 1), p[::2].repeat(2, 1)),
    "every second": lambda p: (p.view(-1)[:WIDTH], p.view(-1)[: 2 * WIDTH : 2]),
}


@pytest.mark.parametrize("views", VIEWS)
def test_two_views_of_one_parameter(views, device):
    def fn(model, x):
        x = model.f(x)
        first, second = VIEWS[views](model.p)
        return model.g(x * first) + model.g(x * second)

    assert_trains_like_stock(fn, random(4, WIDTH, WIDTH, device=device), p=nn.Parameter(random(WIDTH, WIDTH)))


@pytest.mark.parametrize("index", [lambda order: order, lambda order: (slice(None), order)], ids=["alone", "in tuple"])
def test_an_array_that_indexes_is_shuffled_later(index, device):
    def fn(model, x):
        order, random_state = np.arange(16), np.random.RandomState(0)
        x = model.f(x)
        for _ in range(3):
            random_state.shuffle(order)
            x = x + torch.tanh(model.g(torch.sin(x)[index(order)]))
        return x

    assert_trains_like_stock(fn, random(16, 16, WIDTH, device=device))


COMPLEX = {
    "a conjugate and itself": lambda a, v: (torch.mul(a.conj(), 2) @ v).abs() + (a @ v).abs(),
    "times its conjugate": lambda a, v: (a * a.conj()).real,
    "an imaginary part of a conjugate": lambda a, v: (a * 1j).conj().imag.sin() * (a * 1j).imag.exp(),
}


@pytest.mark.parametrize("context", [torch.enable_grad, save_on_cpu], ids=["no hook", "offload"])
@pytest.mark.parametrize("name", COMPLEX)
def test_conjugates(name, context, device):
    only_on_cpu(device)

    def fn(model, x):
        return COMPLEX[name](model.f(x).to(torch.complex64) * (2 + 1j), model.v)

    weight = torch.complex(random(WIDTH, WIDTH), random(WIDTH, WIDTH, seed=1))
    assert_trains_like_stock(fn, random(2, 16, WIDTH), context, v=weight)


@pytest.mark.parametrize("name", ["chunks", "data"])
def test_a_tensor_with_a_version_of_its_own_is_written_to_before_backward(name):
    model = nn.Linear(WIDTH, 2 * WIDTH)
    with Tape(Frame({})):
        first, second = torch.unsafe_chunk(model(random(16, WIDTH)), 2, dim=-1)
        if name == "data":
            second = DATA(first)
        loss = (first * model.weight.sum() * first).sum() + (second * model.weight.sum() * second).sum()
    second.detach().mul_(2)
    with pytest.raises(KeptTensorChangedError):
        loss.backward()


def test_what_is_made_in_inference_mode_is_given_to_blocks(device):
    ids = torch.randint(64, (2, SMALL.seq), device=device)
    with torch.inference_mode():
        mask = torch.ones(SMALL.seq, SMALL.seq, dtype=torch.bool, device=device).tril().repeat(2, 1, 1, 1)
        positions = torch.arange(SMALL.seq, device=device)[None]
    for given in ({"attention_mask": mask}, {"position_ids": positions}):
        batch = {"input_ids": ids, "labels": ids, **given}
        assert_alike(lambda: build("llama", SMALL).to(device), lambda model: step(model, batch))  # noqa: B023


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_conversion_that_the_caller_lets_go_of_is_not_kept(dtype, device):
    """Stock keeps what the model makes of its input, where that is narrower."""

    def fn(model, x):
        low = x.clone().to(torch.bfloat16)
        return model.h(torch.sin(low).float() * model.f(low.float()))

    mine, stock = kept_of(fn, random(8, 64, WIDTH, device=device, dtype=dtype))
    assert mine <= stock


# Sparse tensors, which have neither strides nor a storage: alone, and where a foreign hook is asked.

ROWS = 64
#: What lies around a forward, and how the model is patched.
WAYS = {
    "alone": (contextlib.nullcontext, {}, False), "checkpoint": (contextlib.nullcontext, {}, True),
    "save_on_cpu": (save_on_cpu, {}, False), "offload": (contextlib.nullcontext, {"offload": True}, False),
    "int8": (contextlib.nullcontext, {"storage": "int8"}, False),
}  # fmt: skip


def graph_of_nodes(layout, is_checkpointed):
    graph = torch.rand(ROWS, ROWS).sub(0.5).relu()
    graph = graph.to_sparse() if layout == "coo" else graph.to_sparse_csr()

    def fn(model, x):
        for block in model.blocks:
            x = checkpoint(block, x, graph, use_reentrant=False) if is_checkpointed else block(x, graph)
        return x

    blocks = [Block(lambda block, x, graph: (torch.sparse.mm(graph, block.f(x)) + x).sin()) for _ in range(3)]
    return Attack(fn, blocks=nn.ModuleList(blocks))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("way", WAYS)
def test_a_graph_of_nodes_trains_like_stock(way, layout, device):
    only_on_cpu(device)
    hooks, config, is_checkpointed = WAYS[way]
    found = []
    for is_patched in (True, False):
        torch.manual_seed(0)
        model = graph_of_nodes(layout, is_checkpointed)
        if is_patched:
            patch(model, config)
        found += trained(model, random(ROWS, WIDTH), steps=1, context=hooks)
    if way != "int8":
        return assert_same(*found)
    for name, expected in found[1].items():
        torch.testing.assert_close(found[0][name], expected, rtol=0.05, atol=0.05 * expected.abs().max().item())


def test_a_sparse_argument_is_no_error():
    """A dense result of a function in the table, of which the argument cannot be kept by its storage."""
    mask = torch.eye(WIDTH).to_sparse()
    assert_trains_like_stock(lambda model, x: (model.f(x) + mask).sin(), random(WIDTH, WIDTH))


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_pefts_sparse_adapters_train_like_stock(is_checkpointed):
    def make():
        shira = ShiraConfig(r=4, target_modules=["q_proj", "v_proj"], init_weights=False)
        model = get_peft_model(build("llama"), shira).train()
        if is_checkpointed:
            model.enable_input_require_grads()
            enable_checkpointing(model)
        return model

    assert_alike(make, lambda model: step(model, batch_for(model)))
