"""The chunks of a loss by one kernel: as near to float64 as stock, and only where nobody needs the logits."""

import pytest
import torch
import torch.nn.functional as F

from hf_memsave import MemSaveConfig, patch
from hf_memsave.ops.fused import cross_entropy as fused
from hf_memsave.ops.loss import chunked_loss
from support.accuracy import LONG, adapted, assert_as_near_as_stock, lm, softcapped, step, unread
from support.kernels import interpreted, rounding  # noqa: F401
from support.zoo import batch_for

pytestmark = interpreted
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


def tensors(device, dtype, trains_head=True):
    torch.manual_seed(0)
    x, w = torch.randn(ROWS, WIDTH, device=device), torch.randn(WORDS, WIDTH, device=device)
    target = torch.randint(0, WORDS, (ROWS,), device=device)
    target[::5] = -1
    return x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(trains_head), target


def by_chunks(tensors, fuses, **options):
    """The loss in chunks of five rows; and its gradients."""
    x, w, target = tensors
    loss = F.cross_entropy(unread(x, w, fuses_loss=fuses), target, ignore_index=-1, **options)
    torch.manual_seed(1)
    incoming = torch.randn(loss.shape).to(loss)
    return [loss, *torch.autograd.grad(loss, [x, w] if w.requires_grad else [x], incoming)]


@pytest.mark.parametrize(
    ("reduction", "dtype"),
    [("mean", torch.float32), ("mean", torch.bfloat16), ("sum", torch.float16)], ids=str,
)  # fmt: skip
def test_chunks_by_the_kernel_are_those_by_pytorch(reduction, dtype, device, runs, monkeypatch):
    """How near both are to float64, the vendored kernels' own tests say, and those of the chunked loss."""
    monkeypatch.setattr(chunked_loss, "CHUNK", WORDS * (8 + dtype.itemsize) * 5)
    monkeypatch.setattr(chunked_loss, "TILE", 1)
    monkeypatch.setattr(chunked_loss, "ROWS", 1)
    given = tensors(device, dtype, trains_head=reduction == "mean")
    stock = by_chunks(given, fuses=False, reduction=reduction)
    assert not runs
    ours = by_chunks(given, fuses=True, reduction=reduction)
    assert runs == [5, 5, 5, 5, 5, 5, 5, 2]
    for mine, theirs in zip(ours, stock, strict=True):
        slack = 2 * torch.finfo(mine.dtype).eps
        torch.testing.assert_close(mine, theirs, rtol=slack, atol=slack * float(theirs.abs().max()))


def test_a_target_that_is_no_class_is_refused(device):
    if device.type == "cuda":
        pytest.skip("CUDA's assertion ends the process")
    z, target = torch.randn(3, WORDS), torch.tensor([1, WORDS, 2])
    with pytest.raises(RuntimeError, match="out of bounds"):
        fused.loss_and_gradient(z, target, -100, torch.ones(()))


@pytest.mark.parametrize("make", [lambda: lm("llama"), softcapped])
def test_models_are_as_near_to_float64_as_stock(make, small_chunks, runs):
    assert_as_near_as_stock(make, draws=8, config=TRITON)
    assert len(runs) > 8


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
    model = adapted(targets=["lm_head"])
    patch(model, TRITON)
    step(model, batch)
    assert not runs
