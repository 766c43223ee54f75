"""Fused dropouts, of BERT's sublayers and of LoRA's adapters: gradients, masks, what is kept, and when stock runs."""

import copy

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertOutput, BertSelfOutput
from transformers.models.electra.modeling_electra import ElectraOutput

from hf_memsave import MemSaveConfig, measure_kept, patch
from hf_memsave.arch.fused import fused_of
from hf_memsave.arch.versions import enable_checkpointing
from hf_memsave.measure.fake_device import fake_device, to_fake
from hf_memsave.ops.fused import dropout_norm, lora
from hf_memsave.ops.fused import kernels as kernels_file
from hf_memsave.ops.fused.kernels import kernels
from support.helpers import assert_same_bits, random
from support.kernels import SMALL, TRITON, distance, interpreted, rounding, same, step  # noqa: F401
from support.pairs import pairwise
from support.steps import patched, patched_copy
from support.zoo import batch_for, build

P, SEED, EPS = 0.3, 5, 1e-5


@interpreted
@pytest.mark.parametrize(
    ("low", "wide"), [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_forward_and_backward_drop_the_same(low, wide, device):
    """The vendored kernels' own tests say how near they are to float64."""
    torch.manual_seed(0)
    x, other, dy = (random(6, 24, device=device, seed=seed) for seed in range(3))
    weight, bias = (random(24, device=device, seed=seed).to(wide) for seed in (3, 4))
    noise = kernels().lora_input_forward(torch.ones_like(x), P, SEED)
    assert 0 < (noise == 0).sum() < noise.numel()

    def norm(x, residual, weight, bias):
        return F.layer_norm(x * noise + residual, (24,), weight, bias, EPS)

    for ours, stock, *tensors in [
        (lambda *t: dropout_norm._taped(t, EPS, P, SEED, wide, None), norm, x.to(low), other.to(wide), weight, bias),
        (lambda x: lora.dropped(x, P, SEED, low), lambda x: x * noise, x.to(wide)),
        (lambda z, b: lora.added(z, b, 1.7), lambda z, b: z + b * 1.7, x.to(wide), other.to(low)),
    ]:
        leaves = [t.clone().requires_grad_() for t in tensors]
        exact = [t.detach().float().requires_grad_() for t in leaves]
        y, expected = ours(*leaves), stock(*exact)
        found = [y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))]
        assert [g.dtype for g in found[1:]] == [t.dtype for t in leaves]
        for mine, theirs in zip(found, [expected, *torch.autograd.grad(expected, exact, dy)], strict=True):
            slack, largest = 3 * torch.finfo(low).eps, float(theirs.detach().abs().max())
            torch.testing.assert_close(mine.float(), theirs, rtol=slack, atol=slack * largest)


def model_of(name, device="cpu", dropout=0.1, size=SMALL):
    model = build(name.removesuffix("+lora"), size, dropout=dropout)
    if name.endswith("+lora"):
        options = dict(r=4, lora_alpha=6, target_modules="all-linear", lora_dropout=dropout, init_lora_weights=False)
        model = get_peft_model(model, LoraConfig(**options))
    return model.to(device).train()


OPS = {"bert": "fused_dropout_norm", "llama+lora": "fused_lora", "llama": "fused_rms_norm", "gpt2": "fused_activation"}


@interpreted
@pytest.mark.parametrize("name", OPS)
def test_without_dropout_a_step_is_stocks(name, device):
    model = model_of(name, device, dropout=0.0)
    stock = step(model)
    report = patch(model, TRITON)
    assert OPS[name] in {site.op for site in report.patched}
    ours = step(model)
    assert 0 < distance(ours, stock) < 1e-5
    assert same(step(model), ours)
    report.undo()
    assert same(step(model), stock)


@interpreted
@pytest.mark.parametrize("name", ["bert", "llama+lora"])
def test_masks_follow_the_generator_and_run_again_under_a_checkpoint(name, device):
    model = patched(model_of(name, device), TRITON)
    first = step(model)
    assert same(step(model), first)
    assert distance(step(model, seed=1), first) > 0.01
    again = copy.deepcopy(model)
    enable_checkpointing(again, use_reentrant=False)
    again.enable_input_require_grads()
    assert distance(step(again), first) < 1e-6
    model.eval()
    plain = patched_copy(model, MemSaveConfig(), replace=True)
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
        enable_checkpointing(model, use_reentrant=is_again)
        model.enable_input_require_grads()
    stock = step(model)
    patch(model, MemSaveConfig(backend="triton", **options))
    assert distance(step(model), stock) < 1e-5


@interpreted
@pytest.mark.parametrize("name", ["bert", "llama+lora"])
def test_what_goes_into_a_graph_draws_as_stock(name, device, monkeypatch):
    """Else it would drop the same at each replay."""
    model = model_of(name, device)
    stock = step(model)
    patch(model, TRITON)
    monkeypatch.setattr(kernels_file, "is_capturing", lambda device: True)
    assert distance(step(model), stock) < 1e-5


@interpreted
def test_an_adapter_for_each_row_is_that_which_the_caller_names(device):
    model = model_of("llama+lora", device)
    model.add_adapter("two", LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    stock = copy.deepcopy(model.eval())
    patch(model, TRITON)
    batch = batch_for(model, SMALL)
    found = [one(**batch, adapter_names=["two", "__base__"]).logits for one in (model, stock)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.parametrize("change", [
    lambda model: model.base_model.disable_adapter_layers(),
    lambda model: model.merge_adapter(),
    lambda model: model.add_adapter("two", LoraConfig(r=2, target_modules="all-linear")),
    lambda model: [m.lora_dropout.default.register_forward_hook(lambda m, x, y: 2 * y) for m in adapters(model)],
    lambda model: [m.lora_dropout.update({"default": nn.Hardtanh(-0.1, 0.1)}) for m in adapters(model)],
    lambda model: model.eval(),
], ids=["disabled", "merged", "another added", "hooked", "no dropout but another", "eval"])  # fmt: skip
def test_adapters_in_every_state_compute_what_stock_does(change, device):
    model = patched(model_of("llama+lora", device), MemSaveConfig(backend="triton", dropout="stock"))
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


# The sum before a norm, made again from the sum before the last one


class Sublayers(nn.Module):
    """Two as in a layer of BERT, the second one's residual being the first one's output; between them ``between``."""

    def __init__(self, p=0.0, between=lambda y: y):
        super().__init__()
        torch.manual_seed(0)
        config = BertConfig(hidden_size=16, intermediate_size=16, hidden_dropout_prob=p)
        self.first, self.up, self.second = BertSelfOutput(config), nn.Linear(16, 16), BertOutput(config)
        self.between = between
        for norm in (self.first.LayerNorm, self.second.LayerNorm):
            nn.init.uniform_(norm.weight, 0.5, 2.0)
            nn.init.normal_(norm.bias)

    def forward(self, x):
        y = self.first(x.tanh(), x)
        given = self.between(y)
        return self.second(self.up(y).tanh(), given)


def of_sublayers(model, device, dtype=torch.bfloat16):
    """Under autocast: a sum in fp32 is made again from a product in 16 bits."""
    torch.manual_seed(1)
    x = random(3, 8, 16, device=device).requires_grad_()
    with torch.autocast(x.device.type, dtype):
        y = model(x * 1.5)
    return [y.detach(), *torch.autograd.grad(y.float().cos().sum(), [x, *model.parameters()])]


@pytest.fixture
def summed(monkeypatch):
    """Whether a norm was given, at each sum that was made again."""
    found, stock = [], kernels().dropout_sum

    def dropout_sum(x, residual, p, seed, norm=None):
        found.append(norm is not None)
        return stock(x, residual, p, seed, norm)

    monkeypatch.setattr(kernels(), "dropout_sum", dropout_sum)
    return found


@interpreted
@pytest.mark.parametrize(("p", "dtype"), [(0.0, torch.bfloat16), (0.2, torch.bfloat16), (0.2, torch.float16)])
def test_a_sum_made_again_from_the_last_has_the_bits_of_the_sum_that_was(device, p, dtype, summed, monkeypatch):
    found = []
    for is_known in (True, False):
        if not is_known:
            monkeypatch.setattr(dropout_norm, "_before", lambda tape, y, dtype: None)
        model = patched(Sublayers(p).to(device), TRITON)
        for _ in range(3):
            summed.clear()
            got = of_sublayers(model, device, dtype)
            assert (True in summed) == is_known
        kept = measure_kept(model, {"x": random(3, 8, 16, device=device)}, lambda x, m=model: low_sum(m, x)).total
        found.append((got, kept))
    (ours, kept), (alone, kept_alone) = found
    for mine, theirs in zip(ours, alone, strict=True):
        assert_same_bits(mine, theirs)
    assert kept <= kept_alone


def low_sum(model, x):
    with torch.autocast(x.device.type, torch.bfloat16):
        return model(x.requires_grad_() * 1.5).sum()


def transposed(y):
    return y.reshape(-1, 16)[:16].t().reshape(1, 16, 16).expand(3, 16, 16)[:, :8]


@interpreted
@pytest.mark.parametrize(
    "between",
    [lambda y: y.mul_(2), lambda y: (y.data.mul_(2), y)[1], lambda y: y * 2, lambda y: y.flip(0), transposed],
    ids=["written to", "written to unseen", "another", "a view", "transposed"],
)
def test_a_residual_that_is_not_the_last_norms_output_is_added_itself(device, between, summed):
    model = Sublayers(0.0, between).to(device)
    ours = patched_copy(model, TRITON)
    for _ in range(3):
        for mine, theirs in zip(of_sublayers(ours, device), of_sublayers(model, device), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.02 * float(theirs.abs().amax()))
    assert True not in summed


@interpreted
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_the_other_part_of_a_norm_that_is_half_frozen_gets_its_gradient(device, name):
    model, found = Sublayers().to(device), []
    for norm in (model.first.LayerNorm, model.second.LayerNorm):
        getattr(norm, name).requires_grad_(False)
    ours = patched_copy(model, TRITON)
    for one in (ours, model):
        one(random(3, 8, 16, device=device)).cos().sum().backward()
        found.append({name: p.grad for name, p in one.named_parameters() if p.requires_grad})
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_a_first_residual_in_16_bits_is_added_itself():
    """As Electra-small's, whose embeddings go through a linear: its sum is in 16 bits, and the norm's output is not."""
    with torch.device("meta"):
        model = Sublayers()
    with fake_device() as device:
        to_fake(model, device)
        patch(model, TRITON)
        x = torch.zeros(3, 8, 16, dtype=torch.bfloat16, device=device, requires_grad=True)
        for _ in range(3):
            with torch.autocast(device.type, torch.bfloat16):
                y = model(x)
            y.float().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
