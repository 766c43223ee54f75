"""Fused dropouts, of BERT's sublayers and of LoRA's adapters: gradients, masks, what is kept, and when stock runs."""

import copy

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn
from transformers.models.bert.modeling_bert import BertSelfOutput
from transformers.models.electra.modeling_electra import ElectraOutput

from hf_memsave import MemSaveConfig, patch
from hf_memsave.arch import fused_of
from hf_memsave.ops.fused import dropout_norm, lora
from hf_memsave.ops.fused.kernels import kernels
from support.fake import kept_on_fake
from support.families import QUOTED, batch_for, build
from support.kernels import SMALL, TRITON, distance, interpreted, rounding, same, step  # noqa: F401
from support.pairs import pairwise

ROWS, WIDTH, P, SEED, EPS = 6, 24, 0.3, 5, 1e-5
#: dtype of x, of the residual, and whether y is in fp32 as under autocast
DTYPES = {
    "fp32": (torch.float32, torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "autocast": (torch.bfloat16, torch.float32, torch.float32),
}


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def mask(device):
    """What the kernels multiply with: they draw the same for one seed."""
    ones = torch.ones(ROWS, WIDTH, device=device)
    return kernels().lora_input_forward(ones, P, SEED)


def stocks_norm(x, residual, weight, bias, noise):
    return F.layer_norm((x * noise).to(x.dtype) + residual, (WIDTH,), weight.to(residual), bias.to(residual), EPS)


def no_worse(ours, stock, exact):
    for a, b, c in zip(ours, stock, exact, strict=True):
        assert a.dtype == b.dtype
        half = torch.finfo(a.dtype).eps / 2 * c.norm()
        assert (a.double() - c).norm() <= 1.05 * (b.double() - c).norm() + half


def norm_and_gradients(function, tensors, dy):
    tensors = leaves(*tensors)
    y = function(*tensors)
    return [y, *torch.autograd.grad(y, tensors, dy.to(y.dtype))]


@interpreted
@pytest.mark.parametrize(("mode", "p"), [("fp32", P), ("bf16", 0.0), ("bf16", P), ("autocast", P)])
def test_dropout_norm_is_as_near_to_float64_as_stock(mode, p, device):
    torch.manual_seed(0)
    low, wide, out = DTYPES[mode]
    shapes = [(ROWS, WIDTH, low), (ROWS, WIDTH, wide), (WIDTH, wide), (WIDTH, wide), (ROWS, WIDTH, out)]
    *tensors, dy = (torch.randn(shape[:-1], device=device).to(shape[-1]) for shape in shapes)
    noise = mask(device) if p else torch.ones(ROWS, WIDTH, device=device)

    def stock(*tensors):
        return stocks_norm(*tensors, noise.to(tensors[0].dtype))

    ours = norm_and_gradients(lambda *t: dropout_norm._taped(t, EPS, p, SEED, out, None), tensors, dy)
    exact = norm_and_gradients(lambda *t: stocks_norm(*t, noise.double()), [t.double() for t in tensors], dy)
    no_worse(ours, norm_and_gradients(stock, tensors, dy), exact)


@interpreted
@pytest.mark.parametrize("dtypes", ["float32 float32", "bfloat16 bfloat16", "bfloat16 float32", "float32 bfloat16"])
def test_lora_input_and_output_are_as_near_to_float64_as_stock(dtypes, device):
    torch.manual_seed(0)
    base, adapter = (getattr(torch, name) for name in dtypes.split())
    x, z = (torch.randn(ROWS, WIDTH, device=device).to(base) for _ in range(2))
    b, dy = (torch.randn(ROWS, WIDTH, device=device).to(adapter) for _ in range(2))
    noise, how = mask(device), (P, SEED, adapter)
    ours = norm_and_gradients(lambda x: lora._Input.apply(x, how), [x], dy)
    stock = norm_and_gradients(lambda x: x.to(adapter) * noise.to(adapter), [x], dy)
    no_worse(ours, stock, norm_and_gradients(lambda x: x * noise.double(), [x.double()], dy))
    ours = norm_and_gradients(lambda *t: lora._Output.apply(*t, 1.7), [z, b], dy)
    stock = norm_and_gradients(lambda z, b: (z + b * 1.7).to(base), [z, b], dy)
    exact = norm_and_gradients(lambda z, b: z + b * 1.7, [z.double(), b.double()], dy.to(base))
    no_worse(ours, stock, exact)


def model_of(name, device="cpu", dropout=0.1, size=SMALL):
    model = build(name.removesuffix("+lora"), size, dropout=dropout)
    if name.endswith("+lora"):
        options = dict(r=4, lora_alpha=6, target_modules="all-linear", lora_dropout=dropout, init_lora_weights=False)
        model = get_peft_model(model, LoraConfig(**options))
    return model.to(device).train()


OPS = {"bert": "fused_dropout_norm", "llama+lora": "fused_lora"}


@interpreted
@pytest.mark.parametrize("name", OPS)
def test_without_dropout_a_step_is_stocks(name, device):
    model = model_of(name, device, dropout=0.0)
    stock = step(model)
    report = patch(model, TRITON)
    assert OPS[name] in {site.op for site in report.patched}
    ours = step(model)
    assert 0 < distance(ours, stock) < 1e-5
    report.undo()
    assert same(step(model), stock)


@interpreted
@pytest.mark.parametrize("name", ["bert", "bert+lora"])
def test_masks_follow_the_generator_and_run_again_under_a_checkpoint(name, device):
    model = model_of(name, device)
    patch(model, TRITON)
    first = step(model)
    assert same(step(model), first)
    assert distance(step(model, seed=1), first) > 0.01
    again = copy.deepcopy(model)
    again.gradient_checkpointing_enable(dict(use_reentrant=False))
    again.enable_input_require_grads()
    assert distance(step(again), first) < 1e-6
    model.eval()
    plain = copy.deepcopy(model)
    patch(plain, MemSaveConfig(), replace=True)
    assert distance(step(model), step(plain)) < 1e-5


@interpreted
@pytest.mark.parametrize(
    ("name", "options", "is_again"),
    pairwise(["bert", "llama+lora"], [dict(dropout="stock"), dict(layers={"dropout": 0})], [None, False, True]),
)
def test_dropouts_that_are_left_to_stock_draw_as_stock(name, options, is_again, device):
    """A reentrant checkpoint's first forward has no tape: its masks are those of the second."""
    model = model_of(name, device)
    if is_again is not None:
        model.gradient_checkpointing_enable(dict(use_reentrant=is_again))
        model.enable_input_require_grads()
    stock = step(model)
    patch(model, MemSaveConfig(backend="triton", **options))
    assert distance(step(model), stock) < 1e-5


@interpreted
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.base_model.disable_adapter_layers(),
        lambda model: model.merge_adapter(),
        lambda model: model.add_adapter("two", LoraConfig(r=2, target_modules="all-linear")),
        lambda model: [m.lora_dropout.default.register_forward_hook(lambda m, x, y: 2 * y) for m in adapters(model)],
        lambda model: [m.lora_dropout.update({"default": nn.Hardtanh(-0.1, 0.1)}) for m in adapters(model)],
        lambda model: model.eval(),
    ],
    ids=["disabled", "merged", "another added", "hooked", "no dropout but another", "eval"],
)
def test_adapters_in_every_state_compute_what_stock_does(change, device):
    model = model_of("llama+lora", device)
    patch(model, MemSaveConfig(backend="triton", dropout="stock"))
    stock = model_of("llama+lora", device)
    for one in (model, stock):
        change(one)
    x = batch_for(model, SMALL)
    for one in (model, stock):
        torch.manual_seed(0)
        one.found = one(**x).logits
    torch.testing.assert_close(model.found, stock.found, rtol=1e-4, atol=1e-5)


def adapters(model):
    return [m for m in model.modules() if isinstance(m, LoraLinear)]


@pytest.mark.long
@pytest.mark.parametrize(("name", "mode"), [("bert", "bf16"), ("bert", "autocast"), ("llama+lora", "bf16")])
def test_on_a_gpu_a_layer_keeps_what_the_torch_backend_keeps(name, mode):
    def kept(layers, backend):
        is_lora = name.endswith("+lora")
        family = name.removesuffix("+lora")
        return kept_on_fake(family, layers, mode, lora=is_lora, config=MemSaveConfig(backend=backend))

    ours, torch_backend = ((kept(6, b) - kept(4, b)) / 2 / QUOTED.u(2) for b in ("triton", "torch"))
    assert ours <= 1.01 * torch_backend


def test_a_sublayer_is_known_by_its_forward_and_not_without_its_parts(monkeypatch):
    assert fused_of(ElectraOutput) == fused_of(BertSelfOutput)
    assert fused_of(nn.LayerNorm) is None
    monkeypatch.setattr("hf_memsave.patching.collect.why_not", lambda model: "")
    model = build("bert", SMALL)
    model.bert.encoder.layer[0].output.LayerNorm = nn.LayerNorm(SMALL.hidden, elementwise_affine=False)
    model.bert.encoder.layer[0].attention.output.dropout.register_forward_hook(lambda m, x, y: y)
    skipped = patch(model, MemSaveConfig(backend="auto")).skipped
    assert [site.reason.split()[0:4] for site in skipped if site.op == "fused_dropout_norm"] == [
        ["its", "LayerNorm", "or", "dropout"], ["its", "LayerNorm", "has", "no"],
    ]  # fmt: skip
