"""Log-probabilities, entropies and the like of many logits: stock's, a chunk of rows at a time."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Categorical
from torch.utils.checkpoint import checkpoint
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

from hf_memsave import KeptTensorChangedError, PatchError, patch
from hf_memsave.count.peak import count_peak
from hf_memsave.ops.loss import chunked_loss
from hf_memsave.ops.loss.head import Head
from hf_memsave.ops.loss.lazy_logits import LazyLogits
from support.accuracy import SMALL, adapted, error, lm, softcapped
from support.zoo import Size, batch_for, build

WORDS = 512


def of_chosen(x, ids):
    return x.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def beside_logsumexp(x, ids):
    return torch.gather(x, -1, ids.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(x, dim=-1)


def entropy(x, ids):
    logp = F.log_softmax(x, dim=-1)
    return -(logp.exp() * logp).sum(-1)


def both(x, ids):
    """As GRPO with a bonus has it."""
    logp = torch.log_softmax(x.float() / 0.7, -1)
    return torch.take_along_dim(logp, ids[..., None], dim=2)[..., 0] - 0.1 * (logp.exp() * logp).sum(dim=-1)


def of_categorical(x, ids):
    categorical = Categorical(logits=x)
    return categorical.log_prob(ids) + categorical.entropy()


def of_pairs(x, ids):
    return x.view(-1, WORDS).log_softmax(-1)[torch.arange(ids.numel()), ids.view(-1)]


def of_halves(x, ids):
    return torch.cat([of_chosen(*pair) for pair in zip(x.chunk(2, dim=0), ids.chunk(2), strict=True)])


def smoothed(x, ids):
    return F.cross_entropy(x[:, :-1].reshape(-1, WORDS), ids[:, 1:].reshape(-1), label_smoothing=0.1)


#: What is asked of logits, and how often they are computed: once for each number, and once in backward.
NUMBERS = {
    "log_softmax, gather": (of_chosen, 2), "gather, logsumexp": (beside_logsumexp, 3), "entropy": (entropy, 2),
    "both": (both, 3), "of other tokens": (lambda x, ids: beside_logsumexp(x[:, :-1], ids[:, 1:]), 3),
    "slices of each": (lambda x, ids: x[:, :-1].gather(-1, ids[:, 1:, None])[..., 0] - x[:, :-1].logsumexp(-1), 3),
    "minus logsumexp": (lambda x, ids: of_chosen(x - x.logsumexp(-1, keepdim=True), ids), 3),
    "softmax, gather": (lambda x, ids: F.softmax(x, dim=-1).gather(2, ids[..., None]).squeeze(2).log(), 2),
    "logsumexp, p z": (lambda x, ids: x.logsumexp(-1) - (x.softmax(-1) * x).sum(-1), 3),
    "Categorical": (of_categorical, 4), "pairs": (of_pairs, 2), "halves": (of_halves, 2),
    "a mask": (lambda x, ids: of_chosen(x[ids % 2 == 0], ids[ids % 2 == 0]), 2),
    "largest": (lambda x, ids: x.max(-1).values + x.amax(-1) + x.topk(3).values.sum(-1), 4),
    "means": (lambda x, ids: 1 + x.mean() + (x * x).mean(-1), 3),
    "cross-entropy by token": (lambda x, ids: F.cross_entropy(x.view(-1, WORDS), ids.view(-1), reduction="none"), 2),
    "smoothed": (smoothed, 2), "nll_loss": (lambda x, ids: F.nll_loss(flat(x).log_softmax(-1), ids.view(-1)), 2),
    "TRL's": (partial(selective_log_softmax, temperature=0.9), 3),
    "TRL's entropy": (lambda x, ids: entropy_from_logits(x, 7), 2),
}  # fmt: skip


def flat(x):
    return x.view(-1, WORDS)


@pytest.fixture
def rows(monkeypatch):
    """How many rows of logits each chunk had."""
    counted, stock = [], Head.of_chunk
    monkeypatch.setattr(Head, "of_chunk", lambda self, hidden: counted.append(len(hidden)) or stock(self, hidden))
    return counted


def run(model, ask, mode="fp32"):
    """What is asked, and the gradients of its square."""
    model.zero_grad()
    batch = batch_for(model, Size())
    del batch["labels"]
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        logits = model(**batch).logits
        out = ask(logits, batch["input_ids"])
        loss = out.square().mean()
    loss.backward()
    return logits, out.detach(), [p.grad.clone() for p in model.parameters() if p.requires_grad]


CASES = {"llama": (lambda: lm("llama"), NUMBERS), "softcap": (softcapped, ["both"]), "LoRA": (adapted, NUMBERS)}


@pytest.mark.long
@pytest.mark.parametrize(("make", "names"), CASES.values(), ids=CASES)
def test_what_is_asked_of_each_row_is_stocks(make, names, small_chunks, rows):
    stock = make()
    ours, exact = copy.deepcopy(stock), copy.deepcopy(stock).double()
    patch(ours)
    for name in names:
        ask, times = NUMBERS[name]
        _, expected, of_stock = run(stock, ask)
        truth = run(exact, ask)[2]
        rows.clear()
        logits, found, gradients = run(ours, ask)
        assert type(logits) is LazyLogits and logits._computed is None, name
        assert sum(rows) <= times * 32, name
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5, msg=name)
        assert error(gradients, truth) <= 1.5 * error(of_stock, truth) + 2e-6, name


@pytest.mark.parametrize("mode", ["bf16", "autocast"])
def test_in_low_precision_too(mode, small_chunks):
    stock = lm("llama", torch.bfloat16 if mode == "bf16" else torch.float32)
    ours, exact = copy.deepcopy(stock), copy.deepcopy(stock).double()
    patch(ours)
    for name in ("log_softmax, gather", "gather, logsumexp", "both", "cross-entropy by token", "TRL's"):
        ask = NUMBERS[name][0]
        _, expected, of_stock = run(stock, ask, mode)
        truth = run(exact, ask)[2]
        logits, found, gradients = run(ours, ask, mode)
        assert logits._computed is None and found.dtype == expected.dtype, name
        torch.testing.assert_close(found, expected, rtol=0.01, atol=0.02, msg=name)
        assert error(gradients, truth) <= 1.1 * error(of_stock, truth), name


def dpo(model, ids, ask):
    """A step, whose reference is the model itself without a gradient."""
    found = []
    for has_gradient in (False, True):
        with torch.set_grad_enabled(has_gradient):
            logits = model(input_ids=ids).logits[:, :-1]
            found.append(ask(logits, ids[:, 1:]).sum(-1))
    reference, policy = found
    first, second = policy - reference + torch.tensor([0.2, 0.0])
    F.logsigmoid(first - second).neg().backward()


@pytest.mark.skipif(torch.cuda.is_available(), reason="figures are those of CPU kernels")
@pytest.mark.parametrize("ask", [of_chosen, beside_logsumexp, entropy, both])
def test_a_step_peaks_at_most_at_15_hundredths_of_stocks(ask, monkeypatch):
    """Of 32,000 words and 2,048 tokens, words, tokens and chunks divided by 8, 4 and 16."""
    monkeypatch.setattr(chunked_loss, "CHUNK", chunked_loss.CHUNK // 16)
    size = Size(hidden=16, heads=2, layers=1)
    stock = build("llama", size, intermediate_size=32, num_key_value_heads=2, vocab_size=4_000)
    ours, ids, peaks = copy.deepcopy(stock), torch.randint(0, 4_000, (2, 512)), []
    patch(ours)
    for model in (stock, ours):
        dpo(model, ids[:, :4], ask)
        model.zero_grad()
        peaks.append(count_peak(lambda model=model: dpo(model, ids, ask)).peak)
    assert peaks[1] <= 0.15 * peaks[0]


@pytest.fixture
def ours(small_chunks):
    model = lm("llama")
    patch(model)
    return model


def asked(model):
    batch = batch_for(model, Size())
    del batch["labels"]
    return model(**batch).logits, batch["input_ids"]


def weight(model):
    return model.lm_head.weight.grad.clone()


def assert_like_stock(ours, use):
    """``use(logits, ids)`` gives what it gives in stock, and so do gradients."""
    found = []
    for model in (lm("llama"), ours):
        model.zero_grad()
        out = use(*asked(model))
        found.append((out, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def read_whole(x, ids):
    logp = x.log_softmax(-1)
    (of_chosen(x, ids).mean() + (logp @ torch.ones(WORDS, 2)).mean()).backward()
    return logp.detach().sum()


def written_to(x, ids):
    chosen, place = of_chosen(x, ids), ids.clone()
    chosen.masked_fill_(ids % 2 == 0, 0.0)
    chosen *= 2
    chosen.square().mean().backward()
    with torch.no_grad():
        of_place, later = x.gather(-1, place.unsqueeze(-1))[..., 0], x.logsumexp(-1)
        place.fill_(0)
        x.mul_(3)
    return chosen.detach(), (of_place - later).detach(), x.detach().sum()


def in_another_order(x, ids):
    """Lists and negative numbers choose rows and words."""
    weights, pairs = torch.tensor([[1.0], [3.0]]), flat(x)[[3, 1]].log_softmax(-1)
    (of_chosen(x[[1, 0]], ids) * weights + of_chosen(x, ids)[[1, 0]] * weights).sum().backward()
    return pairs[torch.tensor([-1, 0]), torch.tensor([-2, 5])].detach()


def of_detached(x, ids):
    constant = F.cross_entropy(flat(x.detach()), ids.view(-1))
    with torch.no_grad():
        of_smaller = F.cross_entropy(flat(x), ids.view(-1))
    (of_chosen(x, ids).mean() + F.cross_entropy(flat(x), ids.view(-1))).backward()
    return constant.requires_grad, of_smaller.requires_grad, constant


def compared(x, ids):
    """What is largest has the bits of a logit."""
    top, most = x.topk(3).values[..., -1:], x.max(-1, keepdim=True).values
    assert (x >= top).sum(-1).eq(3).all() and (x == most).any(-1).all()
    assert x.argmax(-1).equal(x.clone().argmax(-1))
    (x.masked_fill(x < top, 0.0).square().mean() + most.mean()).backward()
    return x.argmax(-1), x[:, -1].argmax(-1, keepdim=True), (x == most).int().argmax(-1)


def kept_view(x, ids):
    number = x.gather(-1, ids.unsqueeze(-1))
    with torch.no_grad():
        view = number.squeeze(-1)
    number.log_softmax(1).sum().backward()
    return view


def of_teacher(x, ids):
    """Other logits have other rows; and a number that is hooked is no longer the logits' own."""
    seen, teacher = [], x.detach() * 1.5
    total = x.logsumexp(-1, keepdim=True)
    total.register_hook(lambda dy: seen.append(dy.sum().item()) or 2 * dy)
    kl = teacher.softmax(-1) * (teacher.log_softmax(-1) - (x - total))
    (kl.sum(-1).mean() + (x[0] - x[1]).logsumexp(-1).mean()).backward()
    return torch.tensor(seen)


def read_later(x, ids):
    with torch.no_grad():
        constant = entropy(x, ids)
    logp = of_chosen(x, ids)
    assert not constant.requires_grad and logp.requires_grad and logp.shape == ids.shape
    with torch.inference_mode():
        logp.sum()
    (logp.mean() + x.detach().logsumexp(-1).mean() + x.detach()[:, 1:].logsumexp(-1).mean()).backward()
    return logp.tolist(), constant.sum().item(), logp.detach().numpy().sum().item()


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, numbers):
        return numbers / 2

    @staticmethod
    def backward(ctx, dy):
        return dy / 2


def of_own_function(x, ids):
    Halved.apply(of_chosen(x, ids)).sum().backward()


def twice(x, ids):
    logp, top = of_chosen(x, ids), x.amax(-1)
    logp.mean().backward(retain_graph=True)
    (logp + top).mean().backward()


def in_a_checkpoint(x, ids):
    checkpoint(lambda x: both(x, ids), x, use_reentrant=False).mean().backward()


def hooked(x, ids):
    logp, seen = of_chosen(x, ids), []
    logp.register_hook(lambda dy: seen.append(dy.sum().item()) or 2 * dy)
    (logp.mean() + 3 * x.logsumexp(-1).mean()).backward()
    return seen


def hooked_before(x, ids):
    seen = []
    x.register_hook(lambda dy: seen.append(dy.shape) or 2 * dy)
    of_chosen(x, ids).mean().backward()
    return seen


@pytest.mark.parametrize(
    "use",
    [read_whole, written_to, read_later, of_own_function, twice, in_a_checkpoint, hooked, hooked_before]
    + [in_another_order, of_detached, compared, kept_view, of_teacher],
)
def test_what_else_is_done_with_them_is_as_in_stock(use, ours):
    assert_like_stock(ours, use)


def test_what_an_error_has_ended_is_not_counted_again(ours):
    logits, ids = asked(ours)
    logp = of_chosen(logits, ids)
    handle = logits.rows.gate.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logp.mean().backward(retain_graph=True)
    handle.remove()
    logp.mean().backward()
    found = weight(ours)
    assert_like_stock(ours, lambda x, ids: of_chosen(x, ids).mean().backward())
    assert torch.equal(found, weight(ours))


def test_numbers_are_those_before_the_step_and_logits_read_after_it_are_refused(ours):
    expected = beside_logsumexp(*asked(lm("llama"))).detach()
    logits, ids = asked(ours)
    left = of_chosen(logits, ids)
    with torch.no_grad():
        of_reference, _ = asked(ours)
        ours.lm_head.weight.mul_(2)
    torch.testing.assert_close(left.detach(), expected)
    for refused in (lambda: beside_logsumexp(of_reference, ids), left.mean().backward):
        with pytest.raises(KeptTensorChangedError, match=r"have been written to, .* MemSaveConfig\(loss='stock'\)"):
            refused()


def test_logits_without_gradients_are_those_before_an_optimizers_step(ours):
    with torch.no_grad():
        old, ids = asked(ours)
        expected = asked(lm("llama"))[0]
    ours.lm_head.weight.grad = torch.ones_like(ours.lm_head.weight)
    torch.optim.SGD(ours.parameters(), 0.1).step()
    torch.testing.assert_close(old + 0, expected)
    torch.testing.assert_close(beside_logsumexp(old, ids), beside_logsumexp(expected, ids))


def test_what_cannot_be_is_refused(ours):
    logits, ids = asked(ours)
    logp = of_chosen(logits, ids)
    (first,) = torch.autograd.grad(logp.mean(), [ours.lm_head.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    with pytest.raises(PatchError, match="computed in chunks, past them"):
        torch.autograd.grad(logp.mean(), logits)


def test_several_gradients_at_once(small_chunks):
    found = []
    for is_patched in (False, True):
        model = lm("llama")
        if is_patched:
            patch(model)
        logp = of_chosen(*asked(model)).mean(-1)
        wanted = [model.lm_head.weight, model.model.norm.weight]
        found.append(torch.autograd.grad(logp, wanted, torch.eye(2), is_grads_batched=True))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-7)


def test_where_logits_are_stocks(ours, monkeypatch):
    """With labels, or for inference, where no gradient comes; and where they fit in one chunk."""
    batch = batch_for(ours, Size())
    with torch.no_grad():
        assert type(ours(**batch).logits) is torch.Tensor
        del batch["labels"]
        assert type(ours(**batch).logits) is LazyLogits
    with torch.inference_mode():
        assert type(ours(**batch).logits) is torch.Tensor
    monkeypatch.setattr(chunked_loss, "CHUNK", 1000 * SMALL)
    assert type(asked(ours)[0]) is torch.Tensor
    with torch.no_grad():
        assert type(asked(ours)[0]) is torch.Tensor
