"""Where users compile a patched model it keeps the floor: Inductor gets a partitioner, and gives it back."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._functorch import config as functorch
from torch._inductor import config as inductor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hf_memsave import patch
from hf_memsave.patching.partitioner import Floor
from support.attacks import assert_alike
from support.compiled import saved
from support.helpers import Calls, random
from support.steps import assert_same, patched, step
from support.zoo import Size, batch_for, build, llama_8b

pytestmark = pytest.mark.usefixtures("afresh")
H = 256


def kept(model, batch):
    """Bytes that the compiled forward hands to its backward, without parameters and inputs."""
    with saved(model, batch) as sizes:
        loss = torch.compile(model, fullgraph=True)(**batch).loss
    loss.backward()
    torch._dynamo.reset()
    return sum(sizes)


@pytest.mark.long
@pytest.mark.parametrize(("fields", "expected"), [({}, 23), ({"checkpoint": "gate"}, 4)], ids=["patched", "gate"])
def test_a_compiled_layer_keeps_the_floor(fields, expected, no_codegen):
    ids, totals = torch.randint(0, 64, (2, 64)), []
    for layers in (1, 2):
        model = patched(llama_8b(layers, H), **fields)
        totals.append(kept(model, {"input_ids": ids, "labels": ids}))
    assert (totals[1] - totals[0]) / ids.numel() / H == pytest.approx(expected, abs=0.3)


def a_user_has(what):
    """Settings of the compiler, and the partitioner that there is to be as a patched model is compiled."""
    own = Floor("block")
    return {
        "nothing": (contextlib.nullcontext(), Floor(None)),
        "a budget": (functorch.patch(activation_memory_budget=0.5), None),
        "a partitioner": (inductor.patch(custom_partitioner_fn=own), own),
    }[what]


@pytest.mark.parametrize(
    ("what", "fails"), [("nothing", False), ("nothing", True), ("a budget", False), ("a partitioner", False)]
)
def test_the_partitioner_is_as_it_was_after_a_compile_and_one_that_fails(what, fails):
    model, seen = build("llama", Size(layers=1)), []
    patch(model)
    settings, expected = a_user_has(what)

    def backend(graph, inputs):
        seen.append(inductor.custom_partitioner_fn)
        if fails:
            raise ValueError("no")
        return graph.forward

    raises = pytest.raises(Exception, match="no") if fails else contextlib.nullcontext()
    with settings:
        before = inductor.custom_partitioner_fn
        with raises:
            torch.compile(model, backend=backend)(**batch_for(model, Size()))
        assert inductor.custom_partitioner_fn is before
    assert seen == [expected]


@pytest.mark.long
def test_a_compiled_step_is_that_of_compiled_stock(no_codegen):
    """With dropout, whose masks are drawn again from Inductor's seeds."""

    def make():
        torch._dynamo.reset()
        return build("bert", Size(layers=1))

    assert_alike(make, lambda model: step(torch.compile(model, fullgraph=True), batch_for(model, Size())))


# Parts alone, "regional compilation": nothing of the tape gets into their graphs.

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
    low = torch.bfloat16 if is_autocast else None
    return {f"{n} {name}": x for n in range(3) for name, x in step(model, batch, low=low).items()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "part", "first", "is_autocast"),
    [("llama", "mlp", "compiled", True), ("bert", "norm", "patched", True), ("gpt2", "attention", "compiled", False),
     ("llama", "block", "patched", False), ("bert", "block", "compiled", True)],
)  # fmt: skip
def test_compiled_parts_have_stocks_bits(family, part, first, is_autocast):
    stock = build(family, SIZE, dropout=0.0)
    ours = copy.deepcopy(stock)
    if first == "patched":
        patch(ours)
    compiled(ours, part, "aot_eager")
    if first == "compiled":
        patch(ours)
    compiled(stock, part, "aot_eager")
    assert_same(*(steps(model, batch_for(stock, SIZE), is_autocast) for model in (ours, stock)))


def tanh(x):
    """GELU's approximation, near enough: a chain of functions that the tape would remake."""
    return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))


def broken(x):
    """What a graph cannot hold, between what it can."""
    y = torch.sigmoid(x) * x
    torch._dynamo.graph_break()
    return y.exp().clamp(max=3) * x


def writes(x):
    """It writes to what it makes, and to what it is given."""
    y = x * 3
    y.mul_(2)
    x = x * 1
    x.add_(y)
    return x.sigmoid()


def drops(x):
    torch.manual_seed(3)
    return nn.functional.dropout(x.relu(), 0.5)


@pytest.mark.parametrize(
    ("part", "how", "backend"),
    [(tanh, "method", "aot_eager"), (tanh, "function", "eager"), (broken, "wrapper", "aot_eager"),
     (writes, "function", "aot_eager"), (writes, "method", "eager"), (drops, "wrapper", "eager"),
     (drops, "method", "aot_eager")],
)  # fmt: skip
def test_a_compiled_part_of_a_model_has_stocks_bits(part, how, backend):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch._dynamo.reset()
            self.a, self.b, own = nn.Linear(8, 8), nn.Linear(8, 8), Calls(part)
            if how == "method":
                own.compile(backend=backend)
            else:
                own = torch.compile(own if how == "wrapper" else own.forward, backend=backend)
            self.parts = [own]

        def forward(self, x):
            return self.b(self.parts[0](self.a(x)).sin())

    assert_alike(Model, lambda model: steps(model, random(5, 8)))


def test_of_parts_that_users_compile_nothing_is_counted(caplog):
    """Nor is it said that next to nothing was freed: what those parts keep is theirs."""
    model = build("llama", SIZE)
    report = patch(model)
    compiled(model, "block", "eager")
    step(model, batch_for(model, SIZE))
    assert "not counted: parts of the model are compiled" in str(report)
    assert not [record for record in caplog.records if record.name == "hf_memsave"]


@pytest.mark.parametrize("part", [lambda: nn.LayerNorm(8), lambda: nn.Sequential(nn.GELU())])
def test_no_more_is_compiled_than_in_stock(part):
    counts, results = [], []
    for is_patched in (False, True):
        torch._dynamo.reset()
        counter = CompileCounter()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), part(), nn.Linear(8, 8))
        if is_patched:
            patch(model)
        model[1].compile(backend=counter)
        results.append(steps(model, random(4, 8)))
        counts.append(counter.frame_count)
    assert counts[1] <= counts[0] + isinstance(model[1], nn.LayerNorm)  # which any function mode gives one
    assert_same(*results)


def test_an_export_leaves_the_partitioner():
    model = patched(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
    for strict in (False, True):
        torch.export.export(model, (random(4, 8),), strict=strict)
        assert inductor.custom_partitioner_fn is None


def test_a_model_with_dropout_is_traced():
    def model():
        patch(made := nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Tanh(), nn.Linear(64, 64)))
        return made

    assert make_fx(model())(random(50, 64)).code
    with FakeTensorMode() as mode:
        fake = model()
        fake(mode.from_tensor(random(50, 64))).sum().backward()
    assert fake[0].weight.grad.shape == (64, 64)
