"""Whoever reads the logits of a chunked loss gets stock's, and their gradients."""

import pytest
import torch
import torch.nn.functional as F

from hf_memsave import KeptTensorChangedError, PatchError, patch
from hf_memsave.ops.lazy_logits import LazyLogits
from support.accuracy import lm
from support.families import Size, batch_for


def hands_on(model, batch):
    patch(model)
    out = model(**batch)
    assert type(out.logits) is LazyLogits
    return out.logits


READS = {
    "argmax": lambda x: x.argmax(-1),
    "softmax": lambda x: x.softmax(-1),
    "numpy": lambda x: x.detach().numpy().sum(),
    "item": lambda x: x[0, 0, 0].item(),
    "a mask": lambda x: x[torch.ones(x.shape[:2], dtype=torch.bool)],
    "cat": lambda x: torch.cat([x, x]),
    "matmul": lambda x: x @ torch.ones(x.shape[-1], 2),
    "a part of the words": lambda x: x[..., :7],
    "the last token, as float": lambda x: x[:, -1].float(),
    "rows": lambda x: x.view(-1, x.shape[-1])[3:5],
    "other rows": lambda x: x.reshape(-1, 4),
    "words first": lambda x: x.transpose(1, 2),
    "topk": lambda x: x.topk(3).values,
    "clone": lambda x: x.clone(),
    "scaled": lambda x: (x / 3.0).tanh() * 2,
    "scaled by a tensor": lambda x: x * torch.tensor(2.0),
    "in place": lambda x: x.clone().mul_(2),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "gather": lambda x: x.gather(-1, torch.zeros(*x.shape[:2], 1, dtype=torch.long)),
    "take": lambda x: x.take(torch.tensor([3, 1])),
    "list": lambda x: torch.tensor(x.tolist()),
    "iteration": lambda x: next(iter(x)),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("has_gradient", [False, True])
def test_who_reads_logits_reads_stocks(read, has_gradient, small_chunks):
    model, batch = lm("llama"), batch_for(lm("llama"), Size())
    stock = model(**batch).logits
    with torch.set_grad_enabled(has_gradient):
        expected = torch.as_tensor(READS[read](stock))
    logits = hands_on(model, batch)
    with torch.set_grad_enabled(has_gradient):
        found = READS[read](logits)
        if isinstance(found, LazyLogits):
            found = found.clone()
    found = torch.as_tensor(found)
    assert torch.equal(found, expected)
    if has_gradient:  # without, views of what has one say so in stock
        assert found.requires_grad == expected.requires_grad


class Doubled(torch.autograd.Function):
    """A loss of somebody else's, which is handed the tensor itself."""

    @staticmethod
    def forward(ctx, logits):
        return 2 * logits.sum()

    @staticmethod
    def backward(ctx, dy):
        return dy.expand(2, 16, 512) * 2


LOSSES = {
    "own function": Doubled.apply,
    "softmax and gather": lambda x: -x.log_softmax(-1)[..., 3].mean(),
    "probabilities as target": lambda x: F.cross_entropy(x.view(-1, 512), torch.full((32, 512), 1 / 512)),
    "words first": lambda x: F.cross_entropy(x.transpose(1, 2), torch.zeros(2, 16, dtype=torch.long)),
    "cross-entropy outside": lambda x: F.cross_entropy(x[:, :-1].reshape(-1, 512), torch.zeros(30, dtype=torch.long)),
    "in place": lambda x: x.mul_(2).square().mean(),
    "twice": lambda x: x.square().mean() + F.cross_entropy(x.view(-1, 512).float(), torch.zeros(32, dtype=torch.long)),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_the_users_own_have_stocks_gradients(loss, small_chunks):
    model, batch = lm("llama"), batch_for(lm("llama"), Size())
    del batch["labels"]
    LOSSES[loss](model(**batch).logits).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    LOSSES[loss](hands_on(model, batch)).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-7)


def test_hooks_on_logits_run(small_chunks):
    model, batch = lm("llama"), batch_for(lm("llama"), Size())
    logits, seen = hands_on(model, batch), []
    logits.register_hook(lambda gradient: seen.append(gradient.shape))
    logits.exp().sum().backward()
    assert seen == [logits.shape]


def test_logits_read_after_the_step_raise(small_chunks):
    model, batch = lm("llama"), batch_for(lm("llama"), Size())
    patch(model)
    out = model(**batch)
    out.loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    with pytest.raises(RuntimeError, match=r"before optimizer\.step\(\)"):
        out.logits.argmax(-1)


def test_the_gradient_of_logits_past_which_a_loss_was_computed_is_refused(small_chunks):
    model, batch = lm("llama"), batch_for(lm("llama"), Size())
    patch(model)
    out = model(**batch)
    with pytest.raises(PatchError, match=r"computed in chunks, past them. Use MemSaveConfig\(loss='stock'\)"):
        torch.autograd.grad(out.loss, out.logits)


def test_the_gradient_of_logits_that_a_loss_was_computed_from_is_stocks(small_chunks):
    model, batch = lm("llama"), batch_for(lm("llama"), Size())
    del batch["labels"]
    logits = model(**batch).logits
    (expected,) = torch.autograd.grad(logits.exp().sum(), logits)
    logits = hands_on(model, batch)
    (found,) = torch.autograd.grad(logits.exp().sum(), logits)
    assert torch.equal(found, expected)


def test_hidden_states_written_to_before_logits_are_read_are_refused(small_chunks):
    model, batch = lm("llama"), batch_for(lm("llama"), Size())
    del batch["labels"]
    patch(model)
    out = model(**batch, output_hidden_states=True)
    assert type(out.logits) is LazyLogits
    out.hidden_states[-1].data.add_(0)
    with torch.no_grad():
        out.hidden_states[-1].mul_(2)
    with pytest.raises(KeptTensorChangedError, match=r"written to in place since.* MemSaveConfig\(loss='stock'\)"):
        out.logits.argmax()


def test_logits_read_in_inference_mode_still_have_gradients(small_chunks):
    model, batch = lm("llama"), batch_for(lm("llama"), Size())
    del batch["labels"]
    model(**batch).logits.square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    logits = hands_on(model, batch)
    with torch.inference_mode():
        assert logits.argmax(-1).shape == (2, 16)
    logits.square().mean().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-7)


def test_the_type_of_logits_is_said(small_chunks):
    logits = hands_on(lm("llama"), batch_for(lm("llama"), Size()))
    assert logits.type() == "torch.FloatTensor" and logits.type(torch.float64).dtype == torch.float64
