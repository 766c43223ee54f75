"""Fused ops: where they run, as near to float64 as stock, with the floor kept. The kernels have tests of their own."""

import copy
import importlib
import statistics
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteConfig, Olmo2Config, SmolLM3Config

from hf_memsave import MemSaveConfig, PatchError, patch, unpatch
from hf_memsave.arch import FUSED, path_of
from hf_memsave.ops import chunked_loss
from hf_memsave.ops.fused import cross_entropy
from hf_memsave.ops.fused import kernels as kernels_file
from hf_memsave.tape.meter import measure_kept
from support.fake import kept_on_fake, on_fake
from support.families import QUOTED, Size, batch_for, build
from support.kernels import IS_INTERPRETED, interpreted, rounding  # noqa: F401
from support.launches import Launches

TRITON = MemSaveConfig(backend="triton")
SMALL = Size(hidden=16, heads=2, layers=1, batch=2, seq=5)
FAMILIES = ("bert", "gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "t5-decoder")
SIZES = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
OTHERS = {
    "gemma2": lambda: Gemma2Config(**SIZES, head_dim=8),
    "granite": lambda: GraniteConfig(**SIZES),
    "olmo2": lambda: Olmo2Config(**SIZES),
    "smollm3": lambda: SmolLM3Config(**SIZES),
}


def make(name, device="cpu", seed=0):
    if name in OTHERS:
        model = AutoModelForCausalLM.from_config(OTHERS[name](), attn_implementation="eager").train()
    else:
        model = build(name, SMALL, dropout=0.0)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():  # a weight of ones would hide where it is multiplied
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(device)


def batch_of(name, model):
    if name not in OTHERS:
        return batch_for(model, SMALL)
    ids = torch.randint(3, 64, (SMALL.batch, SMALL.seq), device=model.device)
    return dict(input_ids=ids, labels=ids)


def gradients(model, batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return [loss.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]


def distance(found, exact):
    squares = [(a.double() - b).square().sum() for a, b in zip(found, exact, strict=True)]
    return (sum(squares) / sum(b.square().sum() for b in exact)).sqrt().item()


def fused_in(report):
    return {site.op for site in report.sites if site.op.startswith("fused") and site.status == "patched"}


def of_ours_over_stocks(name, device, mode="fp32", draws=8):
    """Over several models: the distance of our gradients to float64, over that of stock's; the geometric mean."""
    ratios = []
    for seed in range(draws):
        model = make(name, device, seed)
        batch = batch_of(name, model)
        if mode == "bf16":
            model.bfloat16()
        exact = gradients(copy.deepcopy(model).double(), batch)
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=mode == "autocast"):
            stock = gradients(model, batch)
            assert fused_in(patch(model, TRITON))
            ours = gradients(model, batch)
        assert [a.dtype for a in ours] == [b.dtype for b in stock]
        ratios.append(distance(ours, exact) / distance(stock, exact))
    return statistics.geometric_mean(ratios)


@interpreted
@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_gradients_are_as_near_to_float64_as_stocks(name, device):
    assert of_ours_over_stocks(name, device) <= 1.2


@interpreted
@pytest.mark.parametrize("mode", ["bf16", "autocast"])
@pytest.mark.parametrize("name", ["llama", "gemma", "t5-decoder", "gpt2"])
def test_in_low_precision_too(name, mode, device):
    assert of_ours_over_stocks(name, device, mode) <= 1.1


@interpreted
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_same_step_gives_the_same_bits_and_undone_stocks(name, device):
    model = make(name, device)
    batch = batch_of(name, model)
    stock = gradients(model, batch)
    patch(model, TRITON)
    ours, again = gradients(model, batch), gradients(model, batch)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True))
    unpatch(model)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, batch), stock, strict=True))


@interpreted
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5-decoder"])
def test_a_layer_keeps_what_the_torch_backend_keeps(name, device):
    size = Size(hidden=32, heads=2, batch=2, seq=16)

    def layers(count):
        return build(name, replace(size, layers=count), dropout=0.0).to(device)

    def batch(model):
        return batch_for(model, size)

    def kept(backend):
        few, more = (layers(n) for n in (2, 4))
        patch(few, MemSaveConfig(backend=backend))
        patch(more, MemSaveConfig(backend=backend))
        return (measure_kept(more, batch(more)).total - measure_kept(few, batch(few)).total) / 2

    assert kept("triton") <= 1.01 * kept("torch")


@interpreted
def test_gradients_of_gradients_are_refused(device):
    model = make("llama", device)
    patch(model, TRITON)
    loss = model(**batch_of("llama", model)).loss
    (gradient,) = torch.autograd.grad(loss, model.get_input_embeddings().weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def doubles(module, *args):
    return args[-1] * 2


@interpreted
@pytest.mark.parametrize(
    "watch",
    [
        lambda act: act.register_forward_hook(doubles),
        lambda act: act.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        lambda act: act.register_full_backward_hook(lambda module, dx, dy: (dx[0] * 2,)),
        lambda act: act.register_full_backward_pre_hook(lambda module, dy: (dy[0] * 2,)),
        lambda act: setattr(act, "forward", torch.tanh),
    ],
    ids=["forward", "before", "backward", "before-backward", "own-forward"],
)
def test_hooks_on_the_activation_of_a_gated_mlp_run(watch, device):
    model = make("llama", device)
    stock = copy.deepcopy(model)
    patch(model, TRITON)
    for one in (model, stock):
        watch(one.model.layers[0].mlp.act_fn)
    batch = batch_of("llama", model)
    assert distance(gradients(model, batch), gradients(stock, batch)) < 1e-5


@interpreted
def test_under_the_transforms_of_torch_func_stock_runs(device):
    model = make("llama", device)
    stock = copy.deepcopy(model)
    patch(model, TRITON)
    x = torch.randn(3, SMALL.seq, SMALL.hidden, device=device)

    def both(one):
        block = one.model.layers[0]
        found, slope = torch.func.jvp(lambda x: block.mlp(block.input_layernorm(x)), (x,), (torch.ones_like(x),))
        return [found, slope, torch.func.vmap(lambda x: block.mlp(block.input_layernorm(x)))(x)]

    for ours, expected in zip(both(model), both(stock), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.skipif(IS_INTERPRETED or torch.cuda.is_available(), reason="here kernels run")
def test_where_no_kernel_runs_auto_is_torch_and_triton_an_error():
    model, stock = make("llama"), make("llama")
    report = patch(model, MemSaveConfig(backend="auto"))
    assert not fused_in(report)
    assert "no CUDA device" in str(report)
    batch = batch_of("llama", model)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, batch), gradients(stock, batch), strict=True))
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
    batch = batch_of("llama", model)
    if is_installed:
        with pytest.raises(pytest.skip.Exception):
            gradients(model, batch)
    else:
        assert not fused_in(report) and "Triton is not installed" in str(report)
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, batch), gradients(stock, batch), strict=True))
    assert bool(asked) is is_installed


def test_a_module_with_a_foreign_forward_is_not_fused(monkeypatch):
    monkeypatch.setattr("hf_memsave.patching.collect.why_not", lambda model: "")
    model = make("llama")
    model.model.norm.forward = lambda x: x
    (site,) = [site for site in patch(model, MemSaveConfig(backend="auto")).sites if site.name == "model.norm"]
    assert (site.op, site.status) == ("fused_rms_norm", "skipped") and "forward" in site.reason


def test_a_class_with_a_foreign_forward_is_not_fused(monkeypatch):
    monkeypatch.setattr("hf_memsave.patching.collect.why_not", lambda model: "")
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


def test_every_class_of_the_table_is_one_of_transformers():
    for path in FUSED:
        module, name = path.rsplit(".", 1)
        assert path_of(getattr(importlib.import_module(module), name)) == path


@pytest.mark.long
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gemma", "qwen3", "phi3", "t5-decoder"])
def test_on_a_gpu_a_layer_keeps_what_the_torch_backend_keeps(name):
    def kept(backend):
        few, more = (kept_on_fake(name, layers, config=MemSaveConfig(backend=backend)) for layers in (4, 6))
        return (more - few) / 2 / QUOTED.u(2)

    assert kept("triton") <= 1.01 * kept("torch")


def launches(name, config, layers):
    size = replace(QUOTED, layers=layers)
    with on_fake(lambda: build(name, size, torch.bfloat16, dropout=0.0), size=size) as (model, batch):
        if config is not None:
            patch(model, config)
        for _ in range(2):
            model.zero_grad()
            with Launches() as found:
                model(**batch).loss.backward()
    return found.count


@pytest.mark.long
@pytest.mark.parametrize(("name", "most"), [("llama", 0.4), ("gemma", 0.4), ("gpt2", 0.85)])
def test_on_a_gpu_a_layer_takes_fewer_launches_than_stock(name, most):
    few, more = ([launches(name, config, n) for config in (None, MemSaveConfig(), TRITON)] for n in (4, 6))
    stock, torch_backend, triton = ((b - a) / 2 for a, b in zip(few, more, strict=True))
    print(f"{name}, launches of a layer: stock {stock}, torch {torch_backend}, triton {triton}")
    assert triton <= most * stock < torch_backend
