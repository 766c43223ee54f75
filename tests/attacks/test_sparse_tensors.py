"""Attacks with sparse tensors, which have neither strides nor a storage: alone, and where a foreign hook is asked."""

import contextlib
import copy

import pytest
import torch
from peft import ShiraConfig, get_peft_model
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave import patch
from support.families import Size, batch_for, build
from support.helpers import only_on_cpu, random
from support.steps import assert_same, gradients, step

WIDTH, ROWS = 32, 64
#: What lies around a forward, and how the model is patched.
WAYS = {
    "alone": (contextlib.nullcontext, {}, False),
    "checkpoint": (contextlib.nullcontext, {}, True),
    "save_on_cpu": (save_on_cpu, {}, False),
    "offload": (contextlib.nullcontext, {"offload": True}, False),
    "int8": (contextlib.nullcontext, {"storage": "int8"}, False),
}


class Block(GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, graph):
        return (torch.sparse.mm(graph, self.linear(x)) + x).sin()


class Graph(nn.Module):
    def __init__(self, layout, is_checkpointed):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        graph = torch.rand(ROWS, ROWS).sub(0.5).relu()
        self.graph = graph.to_sparse() if layout == "coo" else graph.to_sparse_csr()
        self.is_checkpointed = is_checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, self.graph, use_reentrant=False) if self.is_checkpointed else block(x, self.graph)
        return x


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("way", WAYS)
def test_a_graph_of_nodes_trains_like_stock(way, layout, device):
    only_on_cpu(device)
    hooks, config, is_checkpointed = WAYS[way]
    stock, ours = (Graph(layout, is_checkpointed) for _ in range(2))  # nobody copies sparse rows deeply
    found = []
    patch(ours, config)
    for model in (stock, ours):
        with hooks():
            loss = model(random(ROWS, WIDTH)).pow(2).mean()
        loss.backward()
        found.append({"loss": loss.detach(), **gradients(model)})
    if way != "int8":
        assert_same(*found)
    else:
        for name, expected in found[0].items():
            assert torch.allclose(found[1][name], expected, rtol=0.05, atol=0.05 * expected.abs().max().item()), name


def test_a_sparse_argument_is_no_error():
    """A dense result of a function in the table, of which the argument cannot be kept by its storage."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.mask = torch.eye(WIDTH).to_sparse()

        def forward(self, x):
            return (self.linear(x) + self.mask).sin().sum()

    torch.manual_seed(0)
    stock = Sum()
    ours = copy.deepcopy(stock)
    patch(ours)
    for model in (stock, ours):
        model(random(WIDTH, WIDTH)).backward()
    assert_same(gradients(ours), gradients(stock))


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_pefts_sparse_adapters_train_like_stock(is_checkpointed):
    found = []
    for is_patched in (False, True):
        torch.manual_seed(0)
        base = build("llama", Size())
        model = get_peft_model(base, ShiraConfig(r=4, target_modules=["q_proj", "v_proj"], init_weights=False)).train()
        if is_checkpointed:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable()
        if is_patched:
            patch(model)
        found.append(step(model, batch_for(base, Size())))
    assert_same(*found)
