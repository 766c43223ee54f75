"""Models of which parts alone are compiled, "regional compilation": nothing of the tape gets into their graphs."""

import copy

import pytest
import torch
import torch._functorch.config as partitioner
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hf_memsave import patch
from support.families import Size, batch_for, build
from support.helpers import assert_same_bits, random

SIZE = Size(hidden=64, heads=2, layers=2, batch=2, seq=16)
BLOCKS = ("GPT2Block", "LlamaDecoderLayer", "BertLayer")
PARTS = {
    "mlp": lambda name, module: name.endswith((".mlp", ".intermediate")),
    "attention": lambda name, module: name.endswith((".attn", ".self_attn", ".attention")),
    "norm": lambda name, module: "Norm" in type(module).__name__,
    "block": lambda name, module: type(module).__name__ in BLOCKS,
}


def compiled(model, part, backend):
    found = [module for name, module in model.named_modules() if PARTS[part](name, module)]
    assert found
    for module in found:
        module.compile(backend=backend)
    return model


def steps(model, batch, is_autocast=False):
    """The last loss and gradients of three steps."""
    for _ in range(3):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            out = model(**batch) if isinstance(batch, dict) else model(batch)
        loss = out.loss if isinstance(batch, dict) else out.float().square().sum()
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_same_steps(stock, ours, batch, **options):
    for mine, theirs in zip(steps(ours, batch, **options), steps(stock, batch, **options), strict=True):
        assert_same_bits(mine, theirs)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "part", "first", "is_autocast"),
    [
        ("gpt2", "mlp", "patched", False), ("llama", "mlp", "compiled", True), ("bert", "norm", "patched", True),
        ("gpt2", "attention", "compiled", True), ("llama", "attention", "patched", False),
        ("llama", "block", "compiled", True), ("bert", "block", "patched", True), ("gpt2", "block", "compiled", False),
    ],
)  # fmt: skip
def test_compiled_parts_have_stocks_bits(family, part, first, is_autocast):
    stock = build(family, SIZE, dropout=0.0)
    ours = copy.deepcopy(stock)
    if first == "patched":
        patch(ours)
    compiled(ours, part, "aot_eager")
    if first == "compiled":
        patch(ours)
    assert_same_steps(compiled(stock, part, "aot_eager"), ours, batch_for(stock, SIZE), is_autocast=is_autocast)


class Tanh(nn.Module):
    """GELU's approximation, near enough: a chain of functions that the tape would remake."""

    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))


class Broken(nn.Module):
    """What a graph cannot hold, between what it can."""

    def forward(self, x):
        y = torch.sigmoid(x) * x
        torch._dynamo.graph_break()
        return y.exp().clamp(max=3) * x


class Writes(nn.Module):
    """It writes to what it makes, and to what it is given."""

    def forward(self, x):
        y = x * 3
        y.mul_(2)
        x = x * 1
        x.add_(y)
        return x.sigmoid()


class Drops(nn.Module):
    def forward(self, x):
        torch.manual_seed(3)
        return nn.functional.dropout(x.relu(), 0.5)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["method", "wrapper", "function"])
@pytest.mark.parametrize("part", [Tanh, Broken, Writes, Drops])
def test_a_compiled_part_of_a_model_has_stocks_bits(part, how, backend):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            own = part()
            if how == "method":
                own.compile(backend=backend)
            self.parts = [
                own if how == "method" else torch.compile(own if how == "wrapper" else own.forward, backend=backend)
            ]

        def forward(self, x):
            return self.b(self.parts[0](self.a(x)).sin())

    results = []
    for is_patched in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Model()
        if is_patched:
            patch(model)
        results.append(steps(model, random(5, 8)))
    for mine, theirs in zip(*results, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize(
    "part",
    [lambda: nn.BatchNorm1d(8), lambda: nn.LayerNorm(8), lambda: nn.Linear(8, 8), lambda: nn.Sequential(nn.GELU())],
)
def test_no_more_is_compiled_than_in_stock(part):
    found = []
    for is_patched in (False, True):
        torch._dynamo.reset()
        graphs = []

        def count(graph, inputs, graphs=graphs):
            graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
            return graph.forward

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), part(), nn.Linear(8, 8))
        if is_patched:
            patch(model)
        model[1].compile(backend=count)
        found.append((graphs, steps(model, random(4, 8))))
    (stock, theirs), (ours, mine) = found
    assert len(ours) <= len(stock) + isinstance(model[1], nn.LayerNorm)  # which any function mode gives one
    for a, b in zip(mine, theirs, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_leaves_the_partitioners_budget(strict):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    patch(model)
    before = partitioner.activation_memory_budget
    torch.export.export(model, (random(4, 8),), strict=strict)
    assert partitioner.activation_memory_budget == before


@pytest.mark.parametrize("trace", [make_fx, None], ids=["make_fx", "fake"])
def test_a_model_with_dropout_is_traced(trace):
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Tanh(), nn.Linear(64, 64))
    patch(model)
    if trace is not None:
        assert trace(model)(random(50, 64)).code
        return
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(random(50, 64))
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Tanh(), nn.Linear(64, 64))
        patch(model)
        y = model(fake)
        y.sum().backward()
    assert model[0].weight.grad.shape == (64, 64)
