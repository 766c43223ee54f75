"""Fused ops: where they run, as near to float64 as stock, with the floor kept. The kernels have tests of their own."""

import copy
import importlib
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_memsave import MemSaveConfig, PatchError, patch, unpatch
from hf_memsave.arch.fused import FUSED
from hf_memsave.arch.sites import path_of
from hf_memsave.count.kept import measure_kept
from hf_memsave.ops.fused import cross_entropy
from hf_memsave.ops.fused import kernels as kernels_file
from hf_memsave.ops.loss import chunked_loss
from support.fake import kept_on_fake
from support.helpers import only_on_cpu, swapped
from support.kernels import IS_INTERPRETED, SMALL, TRITON, distance, interpreted, rounding, same, step  # noqa: F401
from support.steps import patched, patched_copy
from support.zoo import QUOTED, Size, batch_for, build


def make(name, device="cpu", seed=0):
    model = build(name, SMALL, dropout=0.0)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():  # a weight of ones would hide where it is multiplied
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(device)


def fused_in(report):
    return {site.op for site in report.sites if site.op.startswith("fused") and site.status == "patched"}


def of_ours_over_stocks(name, device, mode):
    """Over several models: the distance of our gradients to float64, over that of stock's; the geometric mean."""
    ratios = []
    for seed in range(8):
        model = make(name, device, seed)
        if mode == "bf16":
            model.bfloat16()
        exact = step(copy.deepcopy(model).double())
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=mode == "autocast"):
            stock = step(model)
            assert fused_in(patch(model, TRITON))
            ours = step(model)
        assert [a.dtype for a in ours] == [b.dtype for b in stock]
        ratios.append(distance(ours, exact) / distance(stock, exact))
    return statistics.geometric_mean(ratios)


@interpreted
@pytest.mark.parametrize(("name", "mode"), [
    *((name, "fp32") for name in ("bert", "gpt2", "llama", "gemma", "t5-decoder")), ("llama", "bf16"),
    ("llama", "autocast"), ("gemma", "bf16"), ("t5-decoder", "autocast"), ("gpt2", "autocast"),
])  # fmt: skip
def test_gradients_are_as_near_to_float64_as_stocks(name, mode, device):
    assert of_ours_over_stocks(name, device, mode) <= (1.2 if mode == "fp32" else 1.1)


@interpreted
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_first_step_counts_stock_as_the_models_own_functions(family, lora, device):
    only_on_cpu(device, "this count of bytes")
    size = Size(hidden=32, heads=2, layers=2, batch=2, seq=32)
    model = build(family, size)
    model = get_peft_model(model, LoraConfig(r=4)).train() if lora else model
    batch = batch_for(model, size)
    stock = measure_kept(model, batch).total
    first = patch(model, TRITON).step
    kept = measure_kept(model, batch).total
    assert first.nbytes_kept == pytest.approx(kept, rel=0.02)
    assert first.nbytes_kept + first.nbytes_avoided == pytest.approx(stock, rel=0.02)


@interpreted
def test_gradients_of_gradients_are_refused(device):
    model = patched(make("llama", device), TRITON)
    loss = model(**batch_for(model, SMALL)).loss
    (gradient,) = torch.autograd.grad(loss, model.get_input_embeddings().weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


#: How an activation is changed after patching: LLaMA's in a gated MLP, but the last is BERT's.
CHANGES = {
    "forward": lambda act: act.register_forward_hook(lambda module, args, y: y * 2),
    "before": lambda act: act.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "backward": lambda act: act.register_full_backward_hook(lambda module, dx, dy: (dx[0] * 2,)),
    "before-backward": lambda act: act.register_full_backward_pre_hook(lambda module, dy: (dy[0] * 2,)),
    "own-forward": lambda act: setattr(act, "forward", torch.tanh),
    "made_another": lambda act: setattr(act, "act", torch.tanh),
}


@interpreted
@pytest.mark.parametrize("change", CHANGES)
def test_hooks_on_the_activation_run_and_what_it_was_made_since_is_computed(change, device):
    family, name = ("bert", "intermediate_act_fn") if change == "made_another" else ("llama", "act_fn")
    stock = make(family, device)
    ours = patched_copy(stock, TRITON)
    for model in (ours, stock):
        CHANGES[change](next(module for path, module in model.named_modules() if path.endswith(name)))
    assert distance(step(ours), step(stock)) < 1e-5


@interpreted
def test_under_the_transforms_of_torch_func_stock_runs(device):
    model = make("llama", device)
    ours = patched_copy(model, TRITON)
    x = torch.randn(3, SMALL.seq, SMALL.hidden, device=device)

    def both(one):
        block = one.model.layers[0]
        found, slope = torch.func.jvp(lambda x: block.mlp(block.input_layernorm(x)), (x,), (torch.ones_like(x),))
        return [found, slope, torch.func.vmap(lambda x: block.mlp(block.input_layernorm(x)))(x)]

    for mine, expected in zip(both(ours), both(model), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.skipif(IS_INTERPRETED or torch.cuda.is_available(), reason="here kernels run")
def test_where_no_kernel_runs_auto_is_torch_and_triton_an_error():
    model, stock = make("llama"), make("llama")
    report = patch(model, MemSaveConfig(backend="auto"))
    assert not fused_in(report)
    assert "no CUDA device" in str(report)
    assert same(step(model), step(stock))
    with pytest.raises(PatchError, match=r"TRITON_INTERPRET=1.*Use backend='auto' or 'torch'"):
        patch(stock, TRITON)
    assert not any("memsave" in name for name in vars(type(stock)))


@pytest.mark.parametrize("is_installed", [False, True])
def test_without_triton_auto_is_torch_on_any_device(is_installed, monkeypatch):
    """In a chunk of a loss too, which no module is replaced for."""
    asked = []
    monkeypatch.setattr(kernels_file, "has_kernels", lambda x: True)
    monkeypatch.setattr(kernels_file, "is_installed", lambda: is_installed)
    monkeypatch.setattr(chunked_loss, "CHUNK", 64)
    monkeypatch.setattr(cross_entropy, "kernels", lambda: asked.append(None) or pytest.skip("kernels would run"))
    model, stock = make("llama"), make("llama")
    for one in (model, stock):
        one.lm_head.requires_grad_(False)
    patch(stock, MemSaveConfig())
    report = patch(model, MemSaveConfig(backend="auto"))
    if is_installed:
        with pytest.raises(pytest.skip.Exception):
            step(model)
    else:
        assert not fused_in(report) and "Triton is not installed" in str(report)
        assert same(step(model), step(stock))
    assert bool(asked) is is_installed


def test_a_module_or_a_class_with_a_foreign_forward_is_not_fused(monkeypatch):
    monkeypatch.setattr("hf_memsave.patching.collect.why_not", lambda model: "")
    model = make("llama")
    model.model.norm.forward = lambda x: x
    (site,) = [site for site in patch(model, MemSaveConfig(backend="auto")).sites if site.name == "model.norm"]
    assert (site.op, site.status) == ("fused_rms_norm", "skipped") and "forward" in site.reason
    model = make("llama")
    assert "fused_gated" in fused_in(patch(model, MemSaveConfig(backend="auto")))
    unpatch(model)
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    assert "fused_gated" not in fused_in(patch(model, MemSaveConfig(backend="auto")))


def test_what_a_configuration_leaves_to_stock_is_not_fused(monkeypatch):
    monkeypatch.setattr("hf_memsave.patching.collect.why_not", lambda model: "")
    report = patch(make("llama"), MemSaveConfig(backend="auto", norm="stock"))
    assert fused_in(report) == {"fused_gated", "fused_activation", "fused_rotary"}
    report = patch(make("llama"), MemSaveConfig(backend="auto", activation="stock", attention="stock"))
    assert fused_in(report) == {"fused_rms_norm"}
    report = patch(build("llama", replace(SMALL, layers=2)), MemSaveConfig(backend="auto", layers={"norm": 1}))
    assert [site.op for site in report.sites].count("fused_rms_norm") == 3  # of the first block, and the last norm


#: What the classes of the table read of a configuration.
CONFIG = SimpleNamespace(
    hidden_size=16, intermediate_size=24, hidden_act="silu", hidden_activation="gelu_pytorch_tanh", mlp_bias=False
)


@interpreted
@pytest.mark.parametrize("path", [path for path in FUSED if not path.startswith("peft")])
def test_every_class_of_the_table_computes_what_its_kernel_does(path, device):
    module, name = path.rsplit(".", 1)
    cls, fused = getattr(importlib.import_module(module), name), FUSED[path]
    assert path_of(cls) == path
    takes = {"fused_rms_norm": (16,), "fused_gated": (CONFIG,)}
    stock = cls(*takes.get(fused.op, ())).to(device)
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if fused.op == "fused_rms_norm":
        setattr(stock, fused.value[1], 0.1)
    ours, x = swapped(copy.deepcopy(stock), fused.op, fused.value), torch.randn(6, 16, device=device)
    found = []
    for one in (ours, stock):
        leaf = x.clone().requires_grad_()
        y = one(leaf)
        found.append([y.detach(), *torch.autograd.grad(y.sin().sum(), [leaf, *one.parameters()])])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert fused.op == "fused_activation" or not all(map(torch.equal, *found)), "no kernel ran"


@pytest.mark.long
@pytest.mark.parametrize("name", "bert bert-autocast gpt2 llama+lora gemma qwen3 phi3 t5-decoder".split())
def test_on_a_gpu_a_layer_keeps_what_the_torch_backend_keeps(name):
    mode = "autocast" if name.endswith("autocast") else "bf16"
    family, is_lora = name.removesuffix("+lora").removesuffix("-autocast"), name.endswith("+lora")

    def kept(backend):
        config = MemSaveConfig(backend=backend)
        few, more = (kept_on_fake(family, layers, mode, lora=is_lora, config=config) for layers in (4, 6))
        return (more - few) / 2 / QUOTED.u(2)

    assert kept("triton") <= 1.01 * kept("torch")
