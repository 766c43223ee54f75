"""Logits of a chunked loss that are read, written to or watched are stock's, and so are gradients through them."""

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model

from hf_memsave import KeptTensorChangedError, PatchError, patch
from hf_memsave.ops.loss import chunked_loss
from hf_memsave.ops.loss.lazy_logits import LazyLogits
from support.accuracy import lm
from support.zoo import Size, batch_for, build

WORDS = 512


def patched():
    model = lm("llama")
    patch(model)
    return model


def pair():
    """A model, and one patched; and a batch without labels, and its labels."""
    batch = batch_for(stock := lm("llama"), Size())
    return stock, patched(), batch, batch.pop("labels")


def lazy_of(model, batch):
    logits = model(**batch).logits
    assert type(logits) is LazyLogits
    return logits


READS = {
    "softmax": lambda x: x.softmax(-1), "numpy": lambda x: x.detach().numpy().sum(),
    "item": lambda x: x[0, 0, 0].item(), "cat": lambda x: torch.cat([x, x]),
    "matmul": lambda x: x @ torch.ones(x.shape[-1], 2), "a part of the words": lambda x: x[..., :7],
    "the last token, as float": lambda x: x[:, -1].float(), "rows": lambda x: x.view(-1, x.shape[-1])[3:5],
    "other rows": lambda x: x.reshape(-1, 4), "words first": lambda x: x.transpose(1, 2), "clone": lambda x: x.clone(),
    "scaled": lambda x: (x / 3.0).tanh() * 2, "scaled by a tensor": lambda x: x * torch.tensor(2.0),
    "in place": lambda x: x.clone().mul_(2), "norm": lambda x: torch.linalg.vector_norm(x),
    "take": lambda x: x.take(torch.tensor([3, 1])), "list": lambda x: torch.tensor(x.tolist()),
    "iteration": lambda x: next(iter(x)),
}  # fmt: skip


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


def test_logits_read_after_the_step_raise(small_chunks):
    _, ours, batch, labels = pair()
    out = ours(**batch, labels=labels)
    out.loss.backward()
    torch.optim.SGD(ours.parameters(), 0.1).step()
    with pytest.raises(RuntimeError, match=r"before optimizer\.step\(\)"):
        out.logits.argmax(-1)


def test_their_gradient_is_stocks_but_past_which_a_loss_was_computed_it_is_refused(small_chunks):
    stock, ours, batch, labels = pair()
    found = []
    for logits in (stock(**batch).logits, lazy_of(ours, batch)):
        found.append(torch.autograd.grad(logits.square().sum(), logits)[0])
    assert torch.equal(*found)
    out = ours(**batch, labels=labels)
    assert out.logits.type() == "torch.FloatTensor" and out.logits.type(torch.float64).dtype == torch.float64
    with pytest.raises(PatchError, match=r"computed in chunks, past them. Use MemSaveConfig\(loss='stock'\)"):
        torch.autograd.grad(out.loss, out.logits)
    for ask in (lambda x: x.register_hook(print), lambda x: x.retain_grad()):
        with pytest.warns(UserWarning, match=r"gives them no gradient\. Call it in a forward hook"):
            ask(ours(**batch, labels=labels).logits)


def test_hidden_states_written_to_before_logits_are_read_are_refused(small_chunks):
    _, ours, batch, _ = pair()
    out = ours(**batch, output_hidden_states=True)
    assert type(out.logits) is LazyLogits
    out.hidden_states[-1].data.add_(0)
    with torch.no_grad():
        out.hidden_states[-1].mul_(2)
    with pytest.raises(KeptTensorChangedError, match=r"written to in place since.* MemSaveConfig\(loss='stock'\)"):
        out.logits.argmax()


def assert_like_stock(step):
    """``step(model, batch)`` gives stock's gradients, and what it returns."""
    found = []
    for model in (lm("llama"), patched()):
        result = step(model, batch_for(model, Size()))
        found.append((result, [p.grad for p in model.parameters()]))
    (expected, of_stock), (result, ours) = found
    assert result == expected
    torch.testing.assert_close(ours, of_stock, rtol=1e-4, atol=1e-7)


def flat(logits):
    return logits.view(-1, WORDS)


def base_then_view(logits):
    rows = flat(logits)
    logits[..., 5] = -3.0
    return rows


def view_then_base(logits):
    flat(logits)[:, 5] = -3.0
    return flat(logits)


def float_of_float(logits):
    logits.float()[..., 5] = -3.0
    return flat(logits)


def copy_made_before(logits):
    rows = logits[:, ::2].reshape(-1, WORDS)
    logits.mul_(3.0)
    return torch.cat([rows, rows])


@pytest.mark.parametrize("write", [base_then_view, view_then_base, float_of_float, copy_made_before])
def test_a_write_is_seen_by_those_who_share_in_stock(write, small_chunks):
    def step(model, batch):
        labels = batch.pop("labels")
        F.cross_entropy(write(model(**batch).logits), labels.view(-1)).backward()

    assert_like_stock(step)


@pytest.mark.parametrize("how", ["hook of the logits", "hook of the module", "hooked", "view hooked", "retain_grad"])
def test_who_watches_them_sees_the_gradient_and_may_change_it(how, small_chunks):
    def step(model, batch):
        seen, labels = [], batch.pop("labels")

        def watch(gradient):
            seen.append(gradient.shape)
            return 2 * gradient

        if how == "hook of the logits":
            model.lm_head.register_forward_hook(lambda head, args, out: out.register_hook(watch) and None)
        if how == "hook of the module":
            model.lm_head.register_full_backward_pre_hook(lambda head, dy: (watch(dy[0]),))
        if "hook of" in how:
            model(**batch, labels=labels).loss.backward()
            return seen
        logits = model(**batch).logits
        if how == "retain_grad":
            logits.retain_grad()
        rows = flat(logits)
        if how != "retain_grad":
            (rows if how == "view hooked" else logits).register_hook(watch)
        F.cross_entropy(rows, labels.view(-1)).backward()
        return seen or logits.grad.shape

    assert_like_stock(step)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_labels_that_stock_refuses_are_refused(dtype, small_chunks):
    _, ours, batch, labels = pair()
    with pytest.raises(RuntimeError, match="expected target dtype|expected scalar type Long"):
        ours(**batch, labels=labels.to(dtype))


@pytest.mark.long
@pytest.mark.parametrize(("tokens", "kind"), [(16, torch.Tensor), (256, LazyLogits)])
def test_few_tokens_of_a_large_head_are_not_worth_its_sums(tokens, kind, monkeypatch):
    """But in half precision, where a plain head needs none."""
    monkeypatch.setattr(chunked_loss, "CHUNK", 8192)
    size = Size(hidden=256, seq=tokens, batch=1)
    for dtype in (torch.float32, torch.bfloat16):
        model = build("llama", size, dtype, dropout=0.0)
        patch(model)
        assert type(model(**batch_for(model, size)).logits) is (LazyLogits if dtype.itemsize == 2 else kind)
        model = build("llama", size, dtype, dropout=0.0)
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])).train()
        patch(model)
        assert type(model(**batch_for(model, size)).logits) is kind
