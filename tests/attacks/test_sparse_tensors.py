"""Attacks with sparse tensors, which have neither strides nor a storage: alone, and where a foreign hook is asked."""

import contextlib

import pytest
import torch
from peft import ShiraConfig, get_peft_model
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from hf_memsave import patch
from support.attacks import WIDTH, Attack, Block, assert_alike, assert_trains_like_stock, trained
from support.families import Size, batch_for, build
from support.helpers import only_on_cpu, random
from support.steps import assert_same, step

ROWS = 64
#: What lies around a forward, and how the model is patched.
WAYS = {
    "alone": (contextlib.nullcontext, {}, False),
    "checkpoint": (contextlib.nullcontext, {}, True),
    "save_on_cpu": (save_on_cpu, {}, False),
    "offload": (contextlib.nullcontext, {"offload": True}, False),
    "int8": (contextlib.nullcontext, {"storage": "int8"}, False),
}


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
        assert_same(*found)
    else:
        for name, expected in found[1].items():
            assert torch.allclose(found[0][name], expected, rtol=0.05, atol=0.05 * expected.abs().max().item()), name


def test_a_sparse_argument_is_no_error():
    """A dense result of a function in the table, of which the argument cannot be kept by its storage."""
    mask = torch.eye(WIDTH).to_sparse()
    assert_trains_like_stock(lambda model, x: (model.f(x) + mask).sin(), random(WIDTH, WIDTH))


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_pefts_sparse_adapters_train_like_stock(is_checkpointed):
    def make():
        shira = ShiraConfig(r=4, target_modules=["q_proj", "v_proj"], init_weights=False)
        model = get_peft_model(build("llama", Size()), shira).train()
        if is_checkpointed:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable()
        return model

    assert_alike(make, lambda model: step(model, batch_for(model, Size())))
