"""What other tools of PyTorch do to the layers of a model, they do to those of a patched one: with the same bits."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, func, fx, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from hf_memsave import PatchError, measure_kept, patch, unpatch
from support.families import FAMILIES, Size, batch_for, build
from support.helpers import only_on_cpu, random
from support.steps import assert_same, gradients, step
from support.thinned import thinned

pytestmark = pytest.mark.filterwarnings("ignore")  # half of these tools are deprecated, and still in use

#: A dropout's mask is larger than the state of the generator that draws it again.
SIZE = Size(hidden=64, batch=4, seq=32)
STEPS = 2
THREE = ["bert", "gpt2", "llama"]


def pair(family: str) -> tuple[nn.Module, nn.Module]:
    """A stock model, and a patched one with the same parameters."""
    stock = build(family, SIZE)
    with torch.no_grad():
        for parameter in stock.parameters():
            if parameter.dim() == 1:  # as after some training: no norm's weight is one, no bias zero
                parameter.add_(0.3 * torch.randn_like(parameter))
    ours = copy.deepcopy(stock)
    patch(ours)
    return stock, ours


def assert_trains_like(ours: nn.Module, stock: nn.Module) -> None:
    for seed in range(STEPS):
        batch = batch_for(stock, SIZE, padded=True, seed=seed)
        assert_same(step(ours, batch, seed), step(stock, batch, seed))
        for model in (ours, stock):
            torch.optim.SGD(model.parameters(), 0.1).step()


def kept(model: nn.Module) -> int:
    return measure_kept(model, batch_for(model, SIZE)).total


@pytest.mark.parametrize("family", FAMILIES)
def test_only_models_and_blocks_change_their_class(family):
    stock, ours = pair(family)
    changed = [m for m, before in zip(ours.modules(), stock.modules(), strict=True) if type(m) is not type(before)]
    assert changed and kept(ours) < kept(stock)
    others = {type(m).__name__ for m in changed if not isinstance(m, (PreTrainedModel, GradientCheckpointingLayer))}
    assert not others, "for one, type(linear) is nn.Linear no more"


def inside(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    """What is wanted of the modules in blocks, by path."""
    return {name: m for name, m in model.named_modules() if re.search(r"\.\d+\.", name) and wanted(m)}


layers = partial(inside, wanted=lambda m: isinstance(m, (nn.Linear, Conv1D)))
leaves = partial(inside, wanted=lambda m: not list(m.children()))
mlps = partial(inside, wanted=lambda m: type(m).__name__ in ("BertOutput", "LlamaMLP"))


def each(select: Callable[..., Any], tool: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    return lambda model: [tool(module) for module in select(model).values()]


#: Classes that a recipe for initial weights may ask for by their exact type.
PLAIN = (nn.Linear, Conv1D, nn.LayerNorm)
#: Name -> what the tool does to a model.
TOOLS: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": each(layers, parametrizations.weight_norm),
    "spectral_norm": each(layers, parametrizations.spectral_norm),
    "orthogonal": each(layers, parametrizations.orthogonal),
    "old weight_norm": each(layers, nn.utils.weight_norm),
    "old spectral_norm": each(layers, nn.utils.spectral_norm),
    "parametrize": each(layers, lambda m: parametrize.register_parametrization(m, "weight", nn.Tanh())),
    "prune": each(layers, lambda m: prune.l1_unstructured(m, "weight", 0.3)),
    "prune.remove": each(layers, lambda m: prune.remove(prune.ln_structured(m, "weight", 0.25, 2, 0), "weight")),
    "apply(init)": lambda model: model.apply(lambda m: type(m) in PLAIN and nn.init.normal_(m.weight, std=0.1)),
    "jit.script": lambda model: [model.set_submodule(n, torch.jit.script(m)) for n, m in layers(model).items()],
    "fx": lambda model: [model.set_submodule(n, fx.symbolic_trace(m)) for n, m in mlps(model).items()],
    "pre-hook": each(leaves, lambda m: m.register_forward_pre_hook(lambda m, args: (args[0] * 1.25, *args[1:]))),
    "hook": each(leaves, lambda m: m.register_forward_hook(lambda m, args, output: output * 0.75)),
    "in-place hook": each(leaves, lambda m: m.register_forward_hook(lambda m, args, output: output.mul_(0.75))),
    "backward hook": each(leaves, lambda m: m.register_full_backward_hook(lambda m, ins, outs: (ins[0] * 0.5,))),
}
#: They refuse Conv1D in stock as well, and what they make is no module that can be patched later.
COMPILERS = {"jit.script", "fx"}


def with_tool(tool: str, family: str, when: str = "before") -> tuple[nn.Module, nn.Module]:
    """Stock and ours with ``tool``; ours was patched ``when``, "before" or "after" the tool."""
    stock, ours = pair(family)
    if when == "after":
        unpatch(ours)
    for model in (stock, ours):
        torch.manual_seed(5)
        TOOLS[tool](model)
    if when == "after":
        patch(ours)
    return stock, ours


@pytest.mark.parametrize(("tool", "family"), thinned(3, TOOLS, THREE))
def test_a_model_trains_like_stock_keeps_less_and_is_stock_again_after_unpatching_under(tool, family, device):
    only_on_cpu(device)
    if tool in COMPILERS and family == "gpt2":
        pytest.skip("does not apply: it refuses Conv1D in stock")
    plain, changed = build(family, SIZE), build(family, SIZE)
    TOOLS[tool](changed)
    if tool in COMPILERS:
        assert any(isinstance(m, (torch.jit.ScriptModule, fx.GraphModule)) for m in changed.modules())
    else:
        before, after = (step(model, batch_for(plain, SIZE)) for model in (plain, changed))
        assert list(before) != list(after) or not all(map(torch.equal, before.values(), after.values()))
    for when in ("before",) if tool in COMPILERS else ("after", "before"):
        stock, ours = with_tool(tool, family, when)
        assert family == "gpt2" or kept(ours) < kept(stock)
        assert_trains_like(ours, stock)
    unpatch(ours)
    types = [[type(m).__name__ for m in model.modules()] for model in (ours, stock)]
    assert types[0] == types[1] and kept(ours) == kept(stock)
    assert_trains_like(ours, stock)


# Tools that read a model, or make another of it.


@pytest.mark.parametrize("family", thinned(2, THREE))
def test_dynamic_quantization_replaces_the_linears_of_stock(family, device):
    only_on_cpu(device)
    names, logits = [], []
    for model in pair(family):
        quantized = torch.ao.quantization.quantize_dynamic(model.eval(), {nn.Linear}, dtype=torch.qint8)
        names.append([n for n, m in quantized.named_modules() if isinstance(m, torch.ao.nn.quantized.dynamic.Linear)])
        with torch.no_grad():
            logits.append(quantized(**batch_for(model, SIZE)).logits)
    assert names[0] and names[1] == names[0]
    assert torch.equal(*logits)


#: family, path, widths of the inputs
PARTS = [
    ("bert", "bert.encoder.layer.0.attention.self.query", [64]),
    ("bert", "bert.encoder.layer.0.output", [256, 64]),
    ("llama", "model.layers.0.self_attn.q_proj", [64]),
    ("llama", "model.layers.0.mlp", [64]),
]


@pytest.mark.parametrize(("part", "tool"), thinned(2, PARTS, [torch.jit.script, fx.symbolic_trace]))
def test_a_part_of_a_model_is_compiled_like_stocks(part, tool, device):
    only_on_cpu(device)
    family, path, widths = part
    found = []
    for model in pair(family):
        part = tool(model.eval().get_submodule(path))
        inputs = [random(2, 8, width, seed=width).requires_grad_() for width in widths]
        with torch.jit.optimized_execution(False):  # else TorchScript computes in another way from the second call on
            output = part(*inputs)
            output.square().sum().backward()
        found.append([output.detach(), *(x.grad for x in inputs), *(p.grad for p in part.parameters())])
    assert len(found[0]) > len(widths) + 1 and all(map(torch.equal, *found))


@pytest.mark.parametrize("family", THREE)
def test_hooks_on_every_module_see_the_values_of_stock(family, device):
    only_on_cpu(device)
    found = []
    for model in pair(family):
        seen: dict[str, Tensor] = {}

        def see(name: str, *hooked: Any, seen: dict[str, Tensor] = seen) -> None:
            tensors = [t for t in tree_leaves(hooked[1:]) if isinstance(t, Tensor)]
            seen |= {f"{name} {i}": tensor.detach().clone() for i, tensor in enumerate(tensors)}

        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(see, f"{name} before"))
            module.register_forward_hook(partial(see, f"{name} after"))
            module.register_full_backward_hook(partial(see, f"{name} backward"))
        seen |= step(model, batch_for(model, SIZE))
        found.append(dict(sorted(seen.items())))
    assert sum(" backward " in name for name in found[0]) > 20 * SIZE.layers
    assert_same(found[1], found[0])


@pytest.mark.parametrize("family", thinned(2, THREE))
def test_a_moving_average_is_stocks_and_trains_like_it(family, device):
    only_on_cpu(device)
    models = pair(family)
    averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for model in models]
    for seed in range(STEPS):
        for model, average in zip(models, averages, strict=True):
            step(model, batch_for(model, SIZE, seed=seed), seed)
            torch.optim.SGD(model.parameters(), 0.1).step()
            average.update_parameters(model)
    assert_same(averages[1].state_dict(), averages[0].state_dict())
    assert kept(averages[1].module) < kept(averages[0].module)
    assert_trains_like(averages[1].module, averages[0].module)


# torch.func.


def moved(model: nn.Module) -> dict[str, Tensor]:
    return {name: (1.1 * p.detach()).requires_grad_() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", thinned(2, THREE))
def test_a_functional_call_is_stocks_and_keeps_less(family, device):
    only_on_cpu(device)
    found, sizes = [], []
    for model in pair(family):
        parameters = moved(model)
        call = partial(lambda model, given, **batch: func.functional_call(model, given, (), batch), model, parameters)
        sizes.append(measure_kept(model, batch_for(model, SIZE), forward=call).total)
        torch.manual_seed(7)
        loss = call(**batch_for(model, SIZE)).loss
        found.append([loss.detach(), *torch.autograd.grad(loss, list(parameters.values()))])
    assert all(map(torch.equal, *found)) and sizes[1] < sizes[0]


def loss_of(parameters: dict[str, Tensor], model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return func.functional_call(model, parameters, (), {"input_ids": ids, "labels": labels}).loss


of_each = func.vmap(func.grad(loss_of), (None, None, 0, 0))
TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda model, ids, labels: func.grad(loss_of)(moved(model), model, ids, labels),
    "vmap": lambda model, ids, labels: func.vmap(lambda ids: model(input_ids=ids[None]).logits)(ids).detach(),
    "vmap(grad)": lambda model, ids, labels: of_each(moved(model), model, ids[:, None], labels[:, None]),
}


@pytest.mark.parametrize(("transform", "family"), thinned(3, TRANSFORMS, THREE))
def test_a_transform_of_a_model_in_eval_is_stocks(transform, family, device):
    only_on_cpu(device)
    found = []
    for model in pair(family):
        batch = batch_for(model, SIZE)
        found.append(tree_leaves(TRANSFORMS[transform](model.eval(), batch["input_ids"], batch["labels"])))
    assert found[0] and all(map(torch.equal, *found))


@pytest.mark.parametrize("family", thinned(3, THREE))
def test_a_transform_of_something_else_disturbs_no_backward(family, device):
    only_on_cpu(device)
    found = []
    for model in pair(family):
        loss = model.eval()(**batch_for(model, SIZE)).loss
        x = random(5)
        assert torch.equal(func.vmap(func.grad(torch.sin))(x), x.cos())
        loss.backward()
        found.append(gradients(model))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("transform", [func.vmap(torch.exp), func.grad(lambda x: x.exp().sum())], ids=["vmap", "grad"])
def test_a_transform_inside_a_forward_is_stocks_or_says_why_not(transform, device):
    only_on_cpu(device)
    stock, ours = pair("llama")
    for model in (stock, ours):
        model.model.norm.register_forward_hook(lambda m, args, output: output + transform(output.detach()))
    expected = step(stock, batch_for(stock, SIZE))
    try:
        assert_same(step(ours, batch_for(ours, SIZE)), expected)
    except PatchError as error:
        assert "torch.func" in str(error) and "unpatch(model)" in str(error)
