"""The chunks of a loss by one kernel: as near to float64 as stock, and only where nobody needs the logits."""

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model

from hf_memsave import MemSaveConfig, patch
from hf_memsave.ops.fused import cross_entropy as fused
from hf_memsave.ops.fused.kernels import kernels
from hf_memsave.ops.loss import chunked_loss
from support.accuracy import LONG, OfLinear, assert_as_near_as_stock, lm, of_ours_over_stocks, scaled, softcapped, step
from support.families import batch_for
from support.kernels import interpreted, rounding  # noqa: F401

TRITON = MemSaveConfig(backend="triton", norm="stock", activation="stock", dropout="stock", attention="stock")
ROWS, WIDTH, WORDS = 37, 8, 50


@pytest.fixture
def runs(monkeypatch):
    """The rows of each chunk whose loss the kernel computed."""
    found, stock = [], fused.loss_and_gradient

    def counting(z, *args):
        found.append(len(z))
        return stock(z, *args)

    monkeypatch.setattr(fused, "loss_and_gradient", counting)
    return found


def tensors(device, dtype, trains_head=True, seed=0):
    torch.manual_seed(seed)
    x, w = torch.randn(ROWS, WIDTH, device=device), torch.randn(WORDS, WIDTH, device=device)
    target = torch.randint(0, WORDS, (ROWS,), device=device)
    target[::5] = -1
    return x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(trains_head), target


def by_chunks(tensors, fuses, **options):
    """The loss in chunks of five rows; and its gradients."""
    x, w, target = tensors
    like = torch.empty(ROWS, WORDS, dtype=x.dtype, device="meta")
    loss = chunked_loss.cross_entropy(x, OfLinear(w, fuses_loss=fuses), like, target, ignore_index=-1, **options)
    torch.manual_seed(1)
    incoming = torch.randn(loss.shape).to(loss)
    return [loss, *torch.autograd.grad(loss, [x, w] if w.requires_grad else [x], incoming)]


def in_float64(tensors, **options):
    x, w = (t.detach().double().requires_grad_() for t in tensors[:2])
    options = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    loss = F.cross_entropy(x @ w.t(), tensors[2], ignore_index=-1, **options)
    torch.manual_seed(1)
    incoming = torch.randn(loss.shape).to(tensors[0].dtype).to(loss)
    return [loss, *torch.autograd.grad(loss, [x, w], incoming)]


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_chunks_by_the_kernel_are_as_near_to_float64(reduction, dtype, device, runs, monkeypatch):
    itemsize = 8 + dtype.itemsize
    monkeypatch.setattr(chunked_loss, "CHUNK", WORDS * itemsize * 5)
    errors = []
    for seed in range(8):  # of one draw, fp32's roundings differ by a tenth
        given = tensors(device, dtype, trains_head=reduction != "none", seed=seed)
        exact = in_float64(given, reduction=reduction)
        stock = by_chunks(given, fuses=False, reduction=reduction)
        assert not runs
        ours = by_chunks(given, fuses=True, reduction=reduction)
        assert runs == [5, 5, 5, 5, 5, 5, 5, 2]
        runs.clear()
        assert [(a.dtype, a.shape) for a in ours] == [(b.dtype, b.shape) for b in stock]
        errors.append([[(x.double() - c).square().sum() for x, c in zip(found, exact, strict=False)]
                       for found in (ours, stock)])  # fmt: skip
    of_ours, of_stocks = torch.tensor(errors).sum(0)[:, 1:].sqrt()
    assert (of_ours <= 1.02 * of_stocks).all(), (of_ours, of_stocks)
    of_losses = torch.tensor(errors).sum(0)[:, 0].sqrt()
    assert of_losses[0] <= 1.02 * of_losses[1]


@interpreted
@pytest.mark.parametrize("options", [dict(label_smoothing=0.1), dict(weight=True)], ids=str)
def test_what_the_kernel_does_not_know_is_left_to_pytorch(options, device, runs):
    if "weight" in options:
        options = dict(weight=torch.rand(WORDS, device=device))
    given = tensors(device, torch.float32)
    for a, b in zip(by_chunks(given, fuses=True, **options), in_float64(given, **options), strict=False):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)
    assert not runs


@interpreted
def test_a_target_that_is_no_class_is_refused(device):
    if device.type == "cuda":
        pytest.skip("CUDA's assertion ends the process")
    z, target = torch.randn(3, WORDS), torch.tensor([1, WORDS, 2])
    with pytest.raises(RuntimeError, match="out of bounds"):
        fused.loss_and_gradient(z, target, -100, torch.ones(()))


@interpreted
@pytest.mark.parametrize("make", [lambda: lm("llama"), lambda: lm("gpt2"), softcapped, scaled])
def test_models_are_as_near_to_float64_as_stock(make, small_chunks, runs):
    assert_as_near_as_stock(make, draws=8, config=TRITON)
    assert len(runs) > 8


@interpreted
def test_in_bf16_too(small_chunks, runs):
    assert of_ours_over_stocks(lambda: lm("llama", torch.bfloat16), config=TRITON, draws=3) <= 1.001
    assert len(runs) > 3


@interpreted
def test_what_backward_needs_is_not_written_over(small_chunks, runs):
    """tanh keeps its result, which the conversion after it hands on as it is."""
    model = lm("llama")
    batch = batch_for(model, LONG, padded=True)
    report = patch(model, TRITON)
    hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state.detach()
    report.undo()

    class Root(type(model)):
        def forward(self, x, labels):
            logits = torch.tanh(self.lm_head(x)).float()
            return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))

    model.__class__ = Root
    weight = model.lm_head.weight
    (expected,) = torch.autograd.grad(model(hidden, batch["labels"]), weight)
    patch(model, TRITON)
    (found,) = torch.autograd.grad(model(hidden, batch["labels"]), weight)
    assert not runs
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


@interpreted
def test_a_head_with_adapters_and_the_torch_backend_are_left_to_pytorch(small_chunks, runs):
    model = lm("llama")
    batch = batch_for(model, LONG, padded=True)
    patch(model)
    step(model, batch)
    assert not runs
    patch(model, TRITON, replace=True)
    step(model, batch)
    assert runs
    runs.clear()
    model = lm("llama")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["lm_head"], init_lora_weights=False)).train()
    patch(model, TRITON)
    step(model, batch)
    assert not runs


@interpreted
def test_an_error_of_one_percent_is_seen(device, monkeypatch):
    given, stock = tensors(device, torch.float32), kernels().cross_entropy_forward_

    def wrong(z, *args):
        losses = stock(z, *args)
        z.mul_(1.01)
        return losses

    monkeypatch.setattr(kernels(), "cross_entropy_forward_", wrong)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(by_chunks(given, fuses=True), by_chunks(given, fuses=False), rtol=1e-4, atol=1e-6)
