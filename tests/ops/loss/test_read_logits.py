"""Logits of a chunked loss that are read are stock's, and so are gradients through them."""

import pytest
import torch
import torch.nn.functional as F

from hf_memsave import KeptTensorChangedError, PatchError, patch
from hf_memsave.ops.loss.lazy_logits import LazyLogits
from support.accuracy import lm
from support.families import Size, batch_for


def pair():
    """A model, and one patched; and a batch without labels, and its labels."""
    stock, ours = lm("llama"), lm("llama")
    patch(ours)
    batch = batch_for(stock, Size())
    return stock, ours, batch, batch.pop("labels")


def lazy_of(model, batch):
    logits = model(**batch).logits
    assert type(logits) is LazyLogits
    return logits


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


@pytest.mark.parametrize("has_gradient", [False, True])
def test_logits_that_are_read_have_stocks_bits(has_gradient, small_chunks):
    stock, ours, batch, _ = pair()
    of_stock = stock(**batch).logits
    for name, read in READS.items():
        logits = lazy_of(ours, batch)
        with torch.set_grad_enabled(has_gradient):
            expected, found = torch.as_tensor(read(of_stock)), read(logits)
            found = torch.as_tensor(found.clone() if isinstance(found, LazyLogits) else found)
        assert torch.equal(found, expected), name
        if has_gradient:  # without, views of what has one say so in stock
            assert found.requires_grad == expected.requires_grad, name


class Doubled(torch.autograd.Function):
    """A loss that is handed the tensor itself."""

    @staticmethod
    def forward(ctx, logits):
        return 2 * logits.sum()

    @staticmethod
    def backward(ctx, dy):
        return dy.expand(2, 16, 512) * 2


def read_in_inference_mode(logits):
    with torch.inference_mode():
        assert logits.argmax(-1).shape == (2, 16)
    return logits.square().mean()


LOSSES = {
    "own function": Doubled.apply,
    "softmax and gather": lambda x: -x.log_softmax(-1)[..., 3].mean(),
    "probabilities as target": lambda x: F.cross_entropy(x.view(-1, 512), torch.full((32, 512), 1 / 512)),
    "words first": lambda x: F.cross_entropy(x.transpose(1, 2), torch.zeros(2, 16, dtype=torch.long)),
    "cross-entropy outside": lambda x: F.cross_entropy(x[:, :-1].reshape(-1, 512), torch.zeros(30, dtype=torch.long)),
    "in place": lambda x: x.mul_(2).square().mean(),
    "twice": lambda x: x.square().mean() + F.cross_entropy(x.view(-1, 512).float(), torch.zeros(32, dtype=torch.long)),
    "read in inference mode": read_in_inference_mode,
}


def test_losses_of_the_users_own_have_stocks_gradients(small_chunks):
    stock, ours, batch, _ = pair()
    for name, loss in LOSSES.items():
        for model, logits in ((stock, stock(**batch).logits), (ours, lazy_of(ours, batch))):
            model.zero_grad()
            loss(logits).backward()
        for parameter, expected in zip(ours.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-7, msg=name)


def test_hooks_on_logits_run_and_their_type_is_said(small_chunks):
    _, ours, batch, _ = pair()
    logits, seen = lazy_of(ours, batch), []
    assert logits.type() == "torch.FloatTensor"
    assert logits.type(torch.float64).dtype == torch.float64
    logits.register_hook(lambda gradient: seen.append(gradient.shape))
    logits.exp().sum().backward()
    assert seen == [logits.shape]


def test_logits_read_after_the_step_raise(small_chunks):
    _, ours, batch, labels = pair()
    out = ours(**batch, labels=labels)
    out.loss.backward()
    torch.optim.SGD(ours.parameters(), 0.1).step()
    with pytest.raises(RuntimeError, match=r"before optimizer\.step\(\)"):
        out.logits.argmax(-1)


def test_the_gradient_of_logits_past_which_a_loss_was_computed_is_refused(small_chunks):
    _, ours, batch, labels = pair()
    out = ours(**batch, labels=labels)
    with pytest.raises(PatchError, match=r"computed in chunks, past them. Use MemSaveConfig\(loss='stock'\)"):
        torch.autograd.grad(out.loss, out.logits)


def test_the_gradient_of_logits_that_a_loss_was_computed_from_is_stocks(small_chunks):
    stock, ours, batch, _ = pair()
    logits = stock(**batch).logits
    (expected,) = torch.autograd.grad(logits.exp().sum(), logits)
    logits = lazy_of(ours, batch)
    (found,) = torch.autograd.grad(logits.exp().sum(), logits)
    assert torch.equal(found, expected)


def test_hidden_states_written_to_before_logits_are_read_are_refused(small_chunks):
    _, ours, batch, _ = pair()
    out = ours(**batch, output_hidden_states=True)
    assert type(out.logits) is LazyLogits
    out.hidden_states[-1].data.add_(0)
    with torch.no_grad():
        out.hidden_states[-1].mul_(2)
    with pytest.raises(KeptTensorChangedError, match=r"written to in place since.* MemSaveConfig\(loss='stock'\)"):
        out.logits.argmax()
